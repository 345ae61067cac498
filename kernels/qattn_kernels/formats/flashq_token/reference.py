"""FlashQ without its first stage: tokens keep their INT8 scale, and their codes are packed to 4 or 2 bits per channel.

With one scale per block (TurboAttention, Eq. 3), a value much smaller than the others gets few integer levels.
Attention sinks have such values: small, and read by most queries. OScaR and KVarN divide keys by their norms. Here each
token is divided by its largest channel, which the INT8 buffer has already done."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qattn_kernels.formats.base import Operand
from qattn_kernels.formats.flashq.reference import FlashQFormat
from qattn_kernels.formats.scales import from_bits, to_bits
from qattn_kernels.layout import Geometry, TensorSpec, Window


@dataclass(frozen=True)
class FlashQTokenFormat(FlashQFormat):
    """FlashQ for values, with a 16-bit scale per token instead of one fp32 scale per block."""

    name = "flashq_token"
    block_scales = False

    def tensors(self, geo: Geometry, window: Window, dim: int) -> dict[str, TensorSpec]:
        shape = (geo.batch, geo.heads, geo.blocks, window.block)
        return super().tensors(geo, window, dim) | {"scale": TensorSpec(shape, torch.int16, block_dim=2)}

    def first_stage(self, tokens: Operand, keep: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens' codes, and their scales rounded to 16 bits. A scale below 2^-30 becomes 0, and so does its
        token."""
        return tokens.x, from_bits(to_bits(tokens.scales))

    def of_tokens(self, scale: torch.Tensor) -> torch.Tensor:
        return scale

    def as_stored(self, scale: torch.Tensor) -> torch.Tensor:
        return to_bits(scale)

    def restored(self, stored: torch.Tensor) -> torch.Tensor:
        return from_bits(stored)
