"""Which heads of a side have 2 bits, as kernels are told."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats.traits import Low

NONE, ALL, LISTED, RANKED = (tl.constexpr(int(kind)) for kind in Low)  # of a side's heads have 2 bits


def unspecialized(value: int) -> int:
    """`2 * value + 3`, an integer from 0 on in a form for which Triton compiles no kernel of its own.

    Triton compiles a kernel again for an integer argument that is 1, and for one that 16 divides. How many heads have 2
    bits, and which, may be any number and may differ from layer to layer; written so it is odd and above 1, and one
    kernel serves all. `number` reads it back: 0 travels as 3, 1 as 5, 16 as 35.
    """
    return 2 * value + 3


@triton.jit
def number(x):
    """The integer that `unspecialized` wrote: 35 is `(35 >> 1) - 1`, 16."""
    return (x >> 1) - 1
