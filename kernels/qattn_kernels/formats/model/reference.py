"""Unquantized keys or values (bf16/fp16/fp32): the control for every packed format."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qattn_kernels.formats.base import Arrival, Block, Format, Operand, write_rows
from qattn_kernels.layout import Geometry, State, TensorSpec, Window


@dataclass(frozen=True)
class ModelFormat(Format):
    """Keys or values in the model's dtype."""

    name = "model"
    integer = False
    in_model_precision = True

    @property
    def exact_prompts(self) -> bool:
        return True

    def tensors(self, geo: Geometry, window: Window, dim: int) -> dict[str, TensorSpec]:
        return {"x": TensorSpec((geo.batch, geo.heads, geo.blocks, window.block, dim), geo.dtype, block_dim=2)}

    def quantize_tokens(self, new: Arrival, state: State) -> Operand:
        return Operand(new.x.to(state["x"].dtype), None)

    def write(self, state: State, block: Block) -> None:
        write_rows(state["x"], block.index, block.write, block.tokens.x)

    def put(self, state: State, tokens: Operand, block: int, at: int) -> None:
        state["x"][:, :, block, at].copy_(tokens.x[:, :, 0])

    def read(self, state: State, blocks: int) -> Operand:
        return Operand(state["x"][:, :, :blocks], None)

    def bits_per_head(self, state: State, heads: int) -> list[list[int]]:
        bits = torch.finfo(state["x"].dtype).bits
        return [[bits] * heads for _ in range(state["x"].shape[0])]
