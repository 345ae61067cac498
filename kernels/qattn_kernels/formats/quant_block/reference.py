"""llama.cpp's `q8_0` and `q4_0`: blocks of 32 channels of a token with one fp16 scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qattn_kernels.formats.channel_block.reference import LARGEST, ChannelBlockFormat

GROUP = 32


@dataclass(frozen=True)
class QuantBlockFormat(ChannelBlockFormat):
    """8 bits: `scale = max|x| / 127`, `code = round(x / scale)`. 4 bits: `scale = m / -8` with `m` the SIGNED value of
    largest magnitude (the negative one of two), `code = min(15, floor(x / scale + 8.5))`, `value = (code - 8) * scale`.

    Codes come from the scale as it is stored, rounded to fp16.
    """

    name = "quant_block"

    def group(self, dim: int) -> int:
        return GROUP

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = x.aminmax(dim=-1)
        if self.bits == 8:
            top = torch.maximum(high, -low)
            scale = _half(top / torch.full_like(top, 127))  # by a number, CUDA would multiply by its rounded inverse
        else:
            scale = _half(torch.where(high > -low, high, low) / -8)  # exact: a power of two
        divisor = torch.where(scale == 0, 1.0, scale.float())[..., None]
        whole = torch.where(scale[..., None] == 0, 0.0, x / divisor)
        if self.bits == 8:
            return torch.round(whole).clamp(-127, 127).to(torch.int8), scale
        return torch.floor(whole + 8.5).clamp(0, 15).to(torch.uint8), scale

    def levels(self, code: torch.Tensor) -> torch.Tensor:
        return code.float() if self.bits == 8 else code.float() - 8


def _half(scale: torch.Tensor) -> torch.Tensor:
    return scale.clamp(-LARGEST, LARGEST).half()


FORMAT = QuantBlockFormat
