"""Which heads of a side have 2 bits, inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats.base import Low

NONE, ALL, LISTED, RANKED = (tl.constexpr(int(kind)) for kind in Low)  # of a side's heads have 2 bits


def unspecialized(value: int) -> int:
    """An integer as an argument that Triton compiles no kernels apart for, as it does for 1 and multiples of 16: odd
    and above 1."""
    return 2 * value + 3


@triton.jit
def number(x):
    """The inverse of `unspecialized`."""
    return (x >> 1) - 1
