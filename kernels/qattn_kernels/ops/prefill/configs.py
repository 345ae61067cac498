"""Launch configurations of the prefill kernel; those for head dim 128 were the best of several on an H200."""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    """`bn` slots a tile where no position is compared, `tail` where some are; warps, and pipeline stages."""

    bn: int
    tail: int
    warps: int
    stages: int


# (kind of the product with values, power of two that holds the larger head dim); smaller dims take the entry for 64
CONFIGS = {
    ("int8", 64): Config(128, 64, 4, 3),
    ("int8", 128): Config(128, 64, 4, 3),
    ("int8", 256): Config(64, 64, 8, 2),
    ("fp8", 64): Config(128, 64, 4, 3),
    ("fp8", 128): Config(128, 64, 4, 3),
    ("fp8", 256): Config(64, 64, 8, 2),
    ("half", 64): Config(64, 64, 4, 3),
    ("half", 128): Config(64, 64, 4, 2),
    ("half", 256): Config(64, 64, 8, 2),
    ("float", 64): Config(32, 32, 4, 2),
    ("float", 128): Config(32, 32, 4, 2),
    ("float", 256): Config(32, 32, 8, 1),
}
