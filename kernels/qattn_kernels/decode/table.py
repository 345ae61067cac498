"""Launch configurations of the decode, by the sizes of a call; never by its capacity: results must not depend on it."""

from __future__ import annotations

from typing import NamedTuple

from qattn_kernels.sizes import LEAST_COLUMNS, Sizes

# (rows times KV heads up to, programs that share the packed context of each, blocks of a program beyond which more of
# them take part, and how many at most); the last is for more. Read off sweeps of the number of programs on an H200, at
# 8, 32, 128 and 512 rows times heads and 512 to 131072 tokens, with 4-bit kernels that took 168 to 239 registers.
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
    """For `rows` rows of queries a KV head; `model_precision`: of the values, whose tiles are larger."""
    few, long, most = next(found for up_to, *found in SPLITS if up_to is None or rows * size.H <= up_to)
    plan = few, long, LEAST
    if model_precision:
        return Launch(most, plan, 2, 2)
    wide = size.DP > 128 and max(size.K_CHANNELS, size.V_CHANNELS) > 0  # too many for one warp's registers
    if size.N > LEAST_COLUMNS or wide:
        # four warps would take Hopper's wgmma, whose 8-bit form wants weights in an order that Triton 3.6 does not give
        return Launch(most, plan, 2, 3)
    return Launch(most, plan, 1, 3)
