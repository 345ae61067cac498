"""Launch configurations of the decode, by the sizes of a call; never by its capacity: results must not depend on it."""

from __future__ import annotations

from typing import NamedTuple

from qattn_kernels.sizes import Sizes

# (rows times KV heads up to, programs that share the packed context of each, blocks of a program beyond which more of
# them take part, and how many at most); the last is for more. Read off sweeps of the number of programs on an H200, at
# 8, 32, 128 and 512 rows times heads and 512 to 131072 tokens. About 1056 programs run there at once (132
# multiprocessors, 8 each for the registers they take), so that few long ones leave it idle at the end.
SPLITS = ((16, 64, 16, 128), (64, 32, 16, 32), (256, 16, 16, 32), (None, 8, 64, 8))
LEAST = 2  # blocks of a program: for less its own start and its share of the merge cost more than it saves


class Launch(NamedTuple):
    """How a decode is launched.

    Attributes:
        most: programs that share the packed context of a row and head, at most.
        plan: how many of them take part, by the row's own length: see `stretch_of`.
        warps, stages: of each program: its warps, its loads in flight.
    """

    most: int
    plan: tuple[int, int, int]
    warps: int
    stages: int


def choose(size: Sizes, rows: int, model_precision: bool) -> Launch:
    """For `rows` rows of queries a KV head; `model_precision`: of the store, whose tiles are larger."""
    few, long, most = next(found for up_to, *found in SPLITS if up_to is None or rows * size.H <= up_to)
    if model_precision:
        return Launch(most, (few, long, LEAST), 2, 2)
    # four warps would take Hopper's wgmma, whose 8-bit form wants weights in an order that Triton 3.6 does not give
    return Launch(most, (few, long, LEAST), 1 if size.N <= 8 else 2, 3)
