"""INT8 values with one scale per block or per row, and an unquantized ring (bf16/fp16/fp32).

INT-FlashAttention, section 3.2: V has one scale per tensor. The paper names one scale per block as future work."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qattn_kernels.formats.base import Block, FixedBy, OpenFormat, Operand, int8_tokens, write_rows
from qattn_kernels.formats.int8.reference import LEVELS
from qattn_kernels.layout import Geometry, State, TensorSpec, Window


@dataclass(frozen=True)
class Int8BlockFormat(OpenFormat):
    """INT8 per block and head: `scale = max|x| / 127`, `code = round(x / scale)`, stored `[D, tokens]`.

    Attributes:
        granularity: `block`, or the paper's `tensor`: the scale of a row's first block serves all later blocks. Later
            values beyond it are clamped and counted.
    """

    granularity: str = "block"

    name = "int8_block"
    row_weights = True

    def kernel_limits(self, side: str, dim: int) -> str | None:
        if self.granularity == "block":
            return None
        return f"v_granularity is {self.granularity!r}; the kernels scale values by block"

    def tensors(self, geo: Geometry, window: Window, dim: int) -> dict[str, TensorSpec]:
        rows = (geo.batch, geo.heads)
        specs = {"codes": TensorSpec((*rows, geo.blocks, dim, window.block), torch.int8, block_dim=2)}
        if self.granularity == "block":
            return specs | {"scale": TensorSpec((*rows, geo.blocks), torch.float32, block_dim=2)}
        return specs | {"scale": TensorSpec(rows, torch.float32), "clamped": TensorSpec(rows, torch.int64)}

    def _codes(self, x: torch.Tensor, state: State) -> tuple[torch.Tensor, torch.Tensor]:
        """Return unclamped fp32 codes and scales `[...]` of blocks `x` `[B, H, ..., block, D]`."""
        own = int8_tokens(x.float().flatten(-2), LEVELS)
        if self.granularity == "block":
            return own.x.unflatten(-1, x.shape[-2:]).float(), own.scales
        fixed = state["scale"].view(*x.shape[:2], *[1] * (x.dim() - 4))
        scale = torch.where(fixed > 0, fixed, own.scales)
        return torch.round(x.float() / torch.where(scale == 0, 1.0, scale)[..., None, None]), scale

    def block_form(self, tokens: Operand, state: State) -> Operand:
        codes, scale = self._codes(tokens.x, state)
        codes = codes.clamp(-LEVELS, LEVELS).to(torch.int8)
        return Operand(codes, scale[..., None].expand(codes.shape[:-1]))

    def write(self, state: State, block: Block) -> None:
        codes, scale = self._codes(block.tokens.x, state)
        clamped = codes.clamp(-LEVELS, LEVELS)
        write_rows(state["codes"], block.index, block.write, clamped.transpose(-1, -2))
        if self.granularity == "block":
            write_rows(state["scale"], block.index, block.write, scale)
        else:
            state["scale"].copy_(torch.where(block.write[:, None], scale, state["scale"]))
            state["clamped"].add_((codes != clamped).sum((-1, -2)) * block.write[:, None])

    def read(self, state: State, blocks: int) -> Operand:
        codes = state["codes"][:, :, :blocks].transpose(-1, -2)
        scale = state["scale"][:, :, :blocks] if self.granularity == "block" else state["scale"][..., None]
        return Operand(codes, scale[..., None].expand(codes.shape[:-1]))

    @property
    def fixed(self) -> dict[str, FixedBy]:
        return {"scale": FixedBy.BLOCK} if self.granularity == "tensor" else {}
