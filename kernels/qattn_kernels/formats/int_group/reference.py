"""INT8 or INT4 with scales shared by groups of tokens, and an unquantized ring (SageAttention2's keys)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qattn_kernels.formats.base import Block, OpenFormat, Operand, write_rows
from qattn_kernels.formats.granularity import key_groups, key_scales, shared_maximum
from qattn_kernels.formats.int4.reference import OFFSET
from qattn_kernels.formats.packed import pack, unpack
from qattn_kernels.formats.side import Side
from qattn_kernels.layout import Geometry, State, TensorSpec, Window


@dataclass(frozen=True)
class IntGroupFormat(OpenFormat):
    """INT8 or INT4 per group of tokens: `scale = max|x| / 127` (4 bits: 7), `code = round(x / scale)`.

    Attributes:
        bits: 8, or 4 with two tokens of a block in a byte.
        granularity: which tokens of a block share a scale, see `granularity`.
        per_token: for values: codes of blocks are stored `[D, tokens]`.
    """

    bits: int = 8
    granularity: str = "thread"
    per_token: bool = False

    name = "int_group"
    integer = False  # a prefill quantizes the unquantized keys itself

    @property
    def coded(self) -> bool:
        return True

    def side(self, heads: int, dim: int, block: int, values: bool) -> Side:
        return super().side(heads, dim, block, values)._replace(GROUP=self.granularity)

    def kernel_bits(self, heads: int) -> int:
        return self.bits

    @property
    def levels(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def tensors(self, geo: Geometry, window: Window, dim: int) -> dict[str, TensorSpec]:
        shape = (geo.batch, geo.heads, geo.blocks)
        scales = key_scales(self.granularity, window.block)
        codes = (window.block, dim) if self.bits == 8 else (window.block // 2, dim)
        if self.per_token:
            codes = codes[::-1]
        return {
            "codes": TensorSpec((*shape, *codes), torch.int8 if self.bits == 8 else torch.uint8, block_dim=2),
            "scale": TensorSpec((*shape, scales), torch.float32, block_dim=2),
        }

    def requantize(self, x: torch.Tensor) -> Operand:
        return Operand(x, None)

    def write(self, state: State, block: Block) -> None:
        x = block.tokens.x.float()
        top = shared_maximum(torch.where(block.keep, x.abs().amax(-1), 0.0), self.granularity)
        scale = top / torch.full_like(top, self.levels)  # a tensor: CUDA divides by a number via its rounded inverse
        scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
        code = torch.round(x / torch.where(scale == 0, 1.0, scale)[..., None]).clamp(-self.levels, self.levels)
        code = code.to(torch.int8) if self.bits == 8 else pack((code + OFFSET).to(torch.uint8), 4)
        write_rows(state["codes"], block.index, block.write, code.transpose(-1, -2) if self.per_token else code)
        groups = key_groups(self.granularity, x.shape[-2], x.device)
        kept = scale.new_zeros((*scale.shape[:-1], state["scale"].shape[-1]))
        kept.scatter_(-1, groups.expand(scale.shape), scale)  # all tokens of a group write the same
        write_rows(state["scale"], block.index, block.write, kept)

    def read(self, state: State, blocks: int) -> Operand:
        codes = state["codes"][:, :, :blocks]
        codes = codes.transpose(-1, -2) if self.per_token else codes
        codes = codes if self.bits == 8 else unpack(codes, 4).to(torch.int8) - OFFSET
        groups = key_groups(self.granularity, codes.shape[-2], codes.device)
        return Operand(codes, state["scale"][:, :, :blocks][..., groups])
