"""Launch configurations of the decode, by the sizes of a call; never by its capacity: results must not depend on it."""

from __future__ import annotations

from typing import NamedTuple

from qattn_kernels.sizes import Sizes

# (rows times KV heads up to, programs that share a row's packed context, least blocks of each); the last is for more.
# Read off sweeps of the number of programs on an H200, at 8, 32, 128 and 512 rows times heads and 512 to 131072 tokens;
# the least blocks of the last two were chosen so that each context gets the number that was best for it.
SPLITS = ((16, 128, 2), (64, 32, 2), (256, 32, 8), (None, 8, 22))


class Launch(NamedTuple):
    """Programs that share the packed context of a row and head, the least blocks each takes; its warps, its loads in
    flight."""

    splits: int
    least: int
    warps: int
    stages: int


def choose(size: Sizes, rows: int, model_precision: bool) -> Launch:
    """For `rows` rows of queries a KV head; `model_precision`: of the store, whose tiles are larger."""
    splits, least = next(found for most, *found in SPLITS if most is None or rows * size.H <= most)
    if model_precision:
        return Launch(splits, least, 2, 2)
    # four warps would take Hopper's wgmma, whose 8-bit form wants weights in an order that Triton 3.6 does not give
    return Launch(splits, least, 1 if size.N <= 8 else 2, 3)
