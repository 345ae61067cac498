"""Scales of 16 bits inside kernels. `formats/scales.py` specifies the bits."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats import scales

RAISED, LOWERED = tl.constexpr(scales.RAISED), tl.constexpr(1 / scales.RAISED)
LEAST, MOST = tl.constexpr(scales.LEAST), tl.constexpr(scales.MOST)


@triton.jit
def to_bits(scale):
    """Return int16 bits of non-negative fp32 scales, rounded to nearest, ties to even."""
    x = (tl.minimum(scale, MOST) * LOWERED).to(tl.int32, bitcast=True)
    return tl.where(scale < LEAST, 0, (x + 0xFFF + ((x >> 13) & 1)) >> 13).to(tl.int16)


@triton.jit
def from_bits(bits):
    """Return the fp32 scales of bits made by `to_bits`."""
    return ((bits.to(tl.int32) & 0xFFFF) << 13).to(tl.float32, bitcast=True) * RAISED
