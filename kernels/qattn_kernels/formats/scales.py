"""Unsigned 16-bit scales: 6 bits of exponent and 10 of mantissa, with fp16's precision over a range of 2^64.

fp16 spends a bit on the sign and ends at 65,504. Keys and values of bf16 or fp32 models can exceed that, or lie below
its smallest number. Let `m` be the lower 10 bits and `e` the upper 6 bits, at least 1. The scale is then
`2^(e - 31) * (1 + m/1024)`. Examples: 0x8000 is 2, 0x8200 is 3, 0x0400 is 2^-30. Zero is 0.

Shifted left by 13, the 16 bits are an fp32 number whose exponent is 96 too small. A shift and a product therefore
restore a scale without a branch."""

from __future__ import annotations

import torch

RAISED = 2.0**96  # ratio of a scale to the fp32 number of its shifted bits
LEAST = 2.0**-30  # smaller scales become 0
MOST = 2.0**32 * (2 - 2**-10)  # larger scales become this


def to_bits(scale: torch.Tensor) -> torch.Tensor:
    """Return int16 bits of non-negative fp32 scales, rounded to nearest, ties to even, as fp16 rounds within its
    range."""
    x = (scale.clamp(max=MOST) * (1 / RAISED)).view(torch.int32)
    return torch.where(scale < LEAST, 0, (x + 0xFFF + ((x >> 13) & 1)) >> 13).to(torch.int16)


def from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return the fp32 scales of bits made by `to_bits`."""
    return ((bits.int() & 0xFFFF) << 13).view(torch.float32) * RAISED
