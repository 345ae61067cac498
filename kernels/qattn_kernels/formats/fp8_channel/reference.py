"""FP8 E4M3 values with one scale per channel of a block or of a row, and an unquantized ring (bf16/fp16/fp32).

SageAttention2, section 3.5: V has one scale per channel, because values differ more between channels than tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qattn_kernels.formats.base import Block, FixedBy, OpenFormat, Operand, write_rows
from qattn_kernels.formats.fp8.reference import LARGEST, to_fp8
from qattn_kernels.layout import Geometry, State, TensorSpec, Window


@dataclass(frozen=True)
class Fp8ChannelFormat(OpenFormat):
    """FP8 per channel: `scale = max|x| / 448`, `x / scale` rounded to E4M3, stored `[D, tokens]`.

    Attributes:
        v_scale: `block`, or the paper's `prompt`: the scales of a row's first block serve all later blocks. Later
            values beyond them are clamped and counted.
    """

    v_scale: str = "block"

    name = "fp8_channel"
    integer = False
    fp8 = True

    def kernel_limits(self, side: str, dim: int) -> str | None:
        if self.v_scale == "block":
            return None
        return f"v_scale is {self.v_scale!r}; the kernels scale values by block"

    def decode_warps(self, dim: int, block: int, columns: int) -> int:
        return 2 if columns > 8 else 1

    def tensors(self, geo: Geometry, window: Window, dim: int) -> dict[str, TensorSpec]:
        rows = (geo.batch, geo.heads)
        specs = {"codes": TensorSpec((*rows, geo.blocks, dim, window.block), torch.uint8, block_dim=2)}
        if self.v_scale == "block":
            return specs | {"scale": TensorSpec((*rows, geo.blocks, dim), torch.float32, block_dim=2)}
        return specs | {"scale": TensorSpec((*rows, dim), torch.float32), "clamped": TensorSpec(rows, torch.int64)}

    def write(self, state: State, block: Block) -> None:
        x = block.tokens.x.float()
        scale = channel_scale(x)
        if self.v_scale == "prompt":
            first = (block.write & (block.index == 0))[:, None, None]
            state["scale"].copy_(torch.where(first, scale, state["scale"]))
            scale = state["scale"]
            beyond = (x.abs() > scale[:, :, None] * LARGEST * (1 + 1e-6)).sum((-1, -2))  # tolerates one rounding
            state["clamped"].add_(beyond * block.write[:, None])
        else:
            write_rows(state["scale"], block.index, block.write, scale)
        codes = x / torch.where(scale == 0, 1.0, scale)[:, :, None]
        bytes_ = to_fp8(codes.clamp(-LARGEST, LARGEST)).to(torch.float8_e4m3fn).view(torch.uint8)
        write_rows(state["codes"], block.index, block.write, bytes_.transpose(-1, -2))

    def read(self, state: State, blocks: int) -> Operand:
        codes = state["codes"][:, :, :blocks].view(torch.float8_e4m3fn).float().transpose(-1, -2)
        scale = state["scale"][:, :, :blocks] if self.v_scale == "block" else state["scale"][:, :, None]
        return Operand(codes * scale[..., None, :], None)

    @property
    def fixed(self) -> dict[str, FixedBy]:
        return {"scale": FixedBy.BLOCK} if self.v_scale == "prompt" else {}


def channel_scale(x: torch.Tensor) -> torch.Tensor:
    """Return fp32 scales `[..., D]` of values `[..., tokens, D]`. Denormal scales become 0: their codes would
    overflow."""
    top = x.abs().amax(-2)
    scale = top / torch.full_like(top, LARGEST)  # a tensor: CUDA divides by a number via its rounded inverse
    return torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
