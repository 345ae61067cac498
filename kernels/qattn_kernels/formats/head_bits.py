"""Pass integers to kernels, such as the number of 2-bit heads, without a compiled kernel for each value."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats.traits import Low

NONE, ALL, LISTED, RANKED = (tl.constexpr(int(kind)) for kind in Low)  # which of a side's heads have 2 bits


def unspecialized(value: int) -> int:
    """Encode a non-negative integer as `2 * value + 3`, a form that Triton does not specialize on.

    Triton recompiles a kernel for integer arguments equal to 1 or divisible by 16. The number and set of 2-bit heads
    can be any integer and can differ from layer to layer. Encoded, the integer is odd and above 1, so one kernel serves
    all. `number` decodes it: 0 becomes 3, 1 becomes 5, 16 becomes 35."""
    return 2 * value + 3


@triton.jit
def number(x):
    """Decode an integer encoded by `unspecialized`: 35 is `(35 >> 1) - 1`, 16."""
    return (x >> 1) - 1
