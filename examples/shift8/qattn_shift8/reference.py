"""INT8 with a power of two as the scale of a token, stored as one byte."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qattn_kernels.formats.base import Arrival, Block, Format, Operand, write_rows
from qattn_kernels.layout import Geometry, State, TensorSpec, Window

LEVELS = 127
LEAST, MOST = -126, 127  # exponents of normal fp32 numbers


def exponents(x: torch.Tensor) -> torch.Tensor:
    """fp32 `[...]` of tokens `[..., D]`: the least `e` with `max|x| <= LEVELS * 2 ** e`."""
    mantissa, exponent = torch.frexp(x.abs().amax(-1) / LEVELS)  # mantissa in [0.5, 1), 0 for a token of zeros
    least = exponent - (mantissa == 0.5).int()  # an exact power of two is its own scale
    return torch.where(mantissa == 0, LEAST, least).clamp(LEAST, MOST)


@dataclass(frozen=True)
class Shift8Format(Format):
    """`scale = 2 ** e` of a token, `code = round(x / scale)`. Append only: no token is written twice."""

    name = "shift8"

    def tensors(self, geo: Geometry, window: Window, dim: int) -> dict[str, TensorSpec]:
        shape = (geo.batch, geo.heads, geo.blocks, window.block)
        return {
            "codes": TensorSpec((*shape, dim), torch.int8, block_dim=2),
            "exponent": TensorSpec(shape, torch.int8, block_dim=2),
        }

    def quantize_tokens(self, new: Arrival, state: State) -> Operand:
        scale = torch.exp2(exponents(new.x).float())
        return Operand(torch.round(new.x / scale[..., None]).to(torch.int8), scale)

    def write(self, state: State, block: Block) -> None:
        write_rows(state["codes"], block.index, block.write, block.tokens.x)
        write_rows(state["exponent"], block.index, block.write, torch.log2(block.tokens.scales).to(torch.int8))

    def read(self, state: State, blocks: int) -> Operand:
        scale = torch.exp2(state["exponent"][:, :, :blocks].float())
        return Operand(state["codes"][:, :, :blocks], scale)

    def bits_per_head(self, state: State, heads: int) -> list[list[int]]:
        return [[8] * heads for _ in range(state["codes"].shape[0])]

    def kernel_limits(self, side: str, dim: int) -> str | None:
        return "shift8 has no kernels"
