"""INT4 with one scale per token: two tokens of a block per byte, and a ring with one code per byte."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from qattn_kernels.formats.base import Block, Format, Operand, int8_ring, write_rows
from qattn_kernels.formats.packed import pack, unpack
from qattn_kernels.layout import Geometry, State, TensorSpec, Window

LEVELS = 7  # symmetric: -8 is unused
OFFSET = 8  # added to a packed code, which is unsigned


@dataclass(frozen=True)
class Int4Format(Format):
    """INT4 per token: `scale = max|x| / 7`, `code = round(x / scale)`. Keys only."""

    name = "int4"
    windowed = True
    bits: ClassVar[int] = 4

    def kernel_bits(self, heads: int) -> int:
        return self.bits

    def tensors(self, geo: Geometry, window: Window, dim: int) -> dict[str, TensorSpec]:
        shape = (geo.batch, geo.heads, geo.blocks)
        return {
            "codes": TensorSpec((*shape, window.block // 2, dim), torch.uint8, block_dim=2),
            "scale": TensorSpec((*shape, window.block), torch.float32, block_dim=2),
        }

    def ring_tensors(self, geo: Geometry, slots: int, dim: int) -> dict[str, TensorSpec]:
        return int8_ring(geo, slots, dim)

    @property
    def token_levels(self) -> int:
        return LEVELS

    def write(self, state: State, block: Block) -> None:
        write_rows(state["codes"], block.index, block.write, pack((block.tokens.x + OFFSET).to(torch.uint8), 4))
        write_rows(state["scale"], block.index, block.write, block.tokens.scales)

    def read(self, state: State, blocks: int) -> Operand:
        codes = unpack(state["codes"][:, :, :blocks], 4).to(torch.int8) - OFFSET
        return Operand(codes, state["scale"][:, :, :blocks])
