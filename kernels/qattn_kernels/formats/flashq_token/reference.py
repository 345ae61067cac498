"""FlashQ without its first stage: tokens keep their own INT8 scale, and 4 or 2 bits a channel are made of their codes.

Where one scale serves a block (TurboAttention, Eq. 3), a value far smaller than the others has few integers left, and
attention sinks are such values: small, and read by most queries. OScaR and KVarN divide tokens by their norms for keys;
here it is the largest channel, which the INT8 buffer has divided by already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qattn_kernels.formats.base import Operand
from qattn_kernels.formats.flashq.reference import FlashQFormat
from qattn_kernels.formats.scales import from_bits, to_bits
from qattn_kernels.layout import Geometry, TensorSpec, Window


@dataclass(frozen=True)
class FlashQTokenFormat(FlashQFormat):
    """FlashQ with a scale of 16 bits a token of a block in place of one fp32 scale a block; for values."""

    name = "flashq_token"
    block_scales = False

    def tensors(self, geo: Geometry, window: Window, dim: int) -> dict[str, TensorSpec]:
        shape = (geo.batch, geo.heads, geo.blocks, window.block)
        return super().tensors(geo, window, dim) | {"scale": TensorSpec(shape, torch.int16, block_dim=2)}

    def first_stage(self, tokens: Operand, keep: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens' own codes, and their scales as 16 bits hold them: one below 2^-30 is 0, and so is its token."""
        return tokens.x, from_bits(to_bits(tokens.scales))

    def of_tokens(self, scale: torch.Tensor) -> torch.Tensor:
        return scale

    def as_stored(self, scale: torch.Tensor) -> torch.Tensor:
        return to_bits(scale)

    def restored(self, stored: torch.Tensor) -> torch.Tensor:
        return from_bits(stored)


FORMAT = FlashQTokenFormat
