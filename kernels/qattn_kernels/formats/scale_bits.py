"""Scales in 16 bits inside kernels: `formats/scales.py` is the specification of what the bits are."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats import scales

RAISED, LOWERED = tl.constexpr(scales.RAISED), tl.constexpr(1 / scales.RAISED)
LEAST, MOST = tl.constexpr(scales.LEAST), tl.constexpr(scales.MOST)


@triton.jit
def to_bits(scale):
    """int16 of fp32 scales of at least 0: rounded to the nearest, ties to even."""
    x = (tl.minimum(scale, MOST) * LOWERED).to(tl.int32, bitcast=True)
    return tl.where(scale < LEAST, 0, (x + 0xFFF + ((x >> 13) & 1)) >> 13).to(tl.int16)


@triton.jit
def from_bits(bits):
    """fp32 scales of what `to_bits` made."""
    return ((bits.to(tl.int32) & 0xFFFF) << 13).to(tl.float32, bitcast=True) * RAISED
