"""INT8 with one fp32 scale per token: the safe format, and the baseline for all others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qattn_kernels.formats.base import Arrival, Block, Operand, write_rows
from qattn_kernels.formats.traits import TokenScales
from qattn_kernels.layout import Geometry, State, TensorSpec, Window

LEVELS = 127  # the full range: no second stage needs headroom


@dataclass(frozen=True)
class Int8Format(TokenScales):
    """INT8 per token: `scale = max|x| / 127`, `code = round(x / scale)`. Append only: a stored token never changes."""

    name = "int8"

    def tensors(self, geo: Geometry, window: Window, dim: int) -> dict[str, TensorSpec]:
        shape = (geo.batch, geo.heads, geo.blocks, window.block)
        codes = (*shape[:3], dim, window.block) if self.transposed else (*shape, dim)
        return {
            "codes": TensorSpec(codes, torch.int8, block_dim=2),
            "scale": TensorSpec(shape, torch.float32, block_dim=2),
            **self.constants(geo),
        }

    @property
    def token_levels(self) -> int | None:
        return None if self.static else LEVELS

    def quantize_tokens(self, new: Arrival, state: State) -> Operand:
        if not self.static:
            return super().quantize_tokens(new, state)
        scale = self.static_scale(new.x, state)
        return Operand(torch.round(new.x / scale[..., None]).clamp(-LEVELS, LEVELS).to(torch.int8), scale)

    def write(self, state: State, block: Block) -> None:
        codes = block.tokens.x.transpose(-1, -2) if self.transposed else block.tokens.x
        write_rows(state["codes"], block.index, block.write, codes)
        write_rows(state["scale"], block.index, block.write, block.tokens.scales)

    def put(self, state: State, tokens: Operand, block: int, at: int) -> None:
        stored = self.read(state, block + 1)
        stored.x[:, :, block, at].copy_(tokens.x[:, :, 0])
        stored.scales[:, :, block, at].copy_(tokens.scales[:, :, 0])

    def read(self, state: State, blocks: int) -> Operand:
        codes = state["codes"][:, :, :blocks]
        return Operand(codes.transpose(-1, -2) if self.transposed else codes, state["scale"][:, :, :blocks])
