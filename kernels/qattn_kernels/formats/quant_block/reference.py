"""llama.cpp's `q8_0` and `q4_0`: blocks of 32 channels of a token with one 16-bit scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qattn_kernels.formats.base import FP16_MAX, at_fp16_max
from qattn_kernels.formats.channel_block.reference import ChannelBlockFormat
from qattn_kernels.formats.scales import to_bits
from qattn_kernels.layout import State

GROUP = 32


@dataclass(frozen=True)
class QuantBlockFormat(ChannelBlockFormat):
    """Blocks of llama.cpp in 8 or 4 bits.

    8 bits: `scale = max|x| / 127`, `code = round(x / scale)`. 4 bits: `scale = m / -8`, where `m` is the signed value
    of largest magnitude (on a tie the negative one); `code = min(15, floor(x / scale + 8.5))`,
    `value = (code - 8) * scale`.

    Codes are computed from the stored, rounded scale. 4-bit scales are signed and stored in fp16."""

    name = "quant_block"

    def group(self, dim: int) -> int:
        return GROUP

    def encode(self, x: torch.Tensor, channels: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = x.aminmax(dim=-1)
        if self.bits == 8:
            top = torch.maximum(high, -low)
            # a tensor: CUDA divides by a number via its rounded inverse
            scale = to_bits(top / torch.full_like(top, 127))
        else:
            signed = torch.where(high > -low, high, low) / -8  # exact: a power of two
            scale = signed.clamp(-FP16_MAX, FP16_MAX).half()
        whole = self.scales(scale)[..., None]
        whole = torch.where(whole == 0, 0.0, x / torch.where(whole == 0, 1.0, whole))
        if self.bits == 8:
            return torch.round(whole).clamp(-127, 127).to(torch.int8), scale
        return torch.floor(whole + 8.5).clamp(0, 15).to(torch.uint8), scale

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.int16 if self.bits == 8 else torch.float16

    def scales(self, stored: torch.Tensor) -> torch.Tensor:
        return super().scales(stored) if self.bits == 8 else stored.float()

    def levels(self, code: torch.Tensor) -> torch.Tensor:
        return code.float() if self.bits == 8 else code.float() - 8

    def clamped_scales(self, state: State) -> torch.Tensor | None:
        return None if self.bits == 8 else at_fp16_max(state["scale"])
