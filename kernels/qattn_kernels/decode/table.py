"""Launch configurations of the decode, by the sizes of a call; never by its capacity, on which results must not depend."""

from __future__ import annotations

from typing import NamedTuple

from qattn_kernels.sizes import Sizes

PROGRAMS = 1024  # about one wave: 132 multiprocessors of an H200 hold eight programs each
MOST_SPLITS = 128


class Launch(NamedTuple):
    """Programs that share the packed context of a row and head, the least blocks each takes; its warps, its loads in
    flight."""

    splits: int
    least: int
    warps: int
    stages: int


def choose(size: Sizes, rows: int) -> Launch:
    """For `rows` rows of queries a KV head."""
    splits = max(1, min(MOST_SPLITS, PROGRAMS // (rows * size.H)))
    # four warps would take Hopper's wgmma, whose 8-bit form wants weights in an order that Triton 3.6 does not give
    return Launch(splits, 2, 1 if size.N <= 8 else 2, 3)
