"""Scales in 16 bits without a sign: 6 bits of exponent and 10 of mantissa, so fp16's precision over 2^64.

fp16 spends a bit on a sign that scales do not have, and ends at 65,504: keys and values of a model in bf16 or fp32 lie
beyond that, or below its smallest. The lower 10 bits `m` and the upper 6 bits `e` stand for `2^(e - 31) * (1 + m/1024)`
with `e` from 1 on: 0x8000 is 2, 0x8200 is 3, 0x0400 is 2^-30. Zero is 0. All 16 bits are the bits of an fp32 number,
shifted by 13, whose exponent is 96 too small: so a shift and a product restore a scale, and no case needs a branch.
"""

from __future__ import annotations

import torch

RAISED = 2.0**96  # a scale over the fp32 number that its bits are, shifted
LEAST = 2.0**-30  # smaller scales become 0
MOST = 2.0**32 * (2 - 2**-10)  # larger scales become this


def to_bits(scale: torch.Tensor) -> torch.Tensor:
    """int16 of fp32 scales of at least 0: rounded to the nearest, ties to even, as fp16 does where it has a number."""
    x = (scale.clamp(max=MOST) * (1 / RAISED)).view(torch.int32)
    return torch.where(scale < LEAST, 0, (x + 0xFFF + ((x >> 13) & 1)) >> 13).to(torch.int16)


def from_bits(bits: torch.Tensor) -> torch.Tensor:
    """fp32 scales of what `to_bits` made."""
    return ((bits.int() & 0xFFFF) << 13).view(torch.float32) * RAISED
