"""FP8 E4M3 with one scale per token: more range within a token than INT8, but coarser steps near its maximum."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qattn_kernels.formats.base import Arrival, Block, Operand, write_rows
from qattn_kernels.formats.traits import TokenScales
from qattn_kernels.layout import Geometry, State, TensorSpec, Window

LARGEST = 448.0  # largest E4M3 number


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round numbers of at most 448 to E4M3, returned in fp16, which holds all of them exactly.

    Zeros are positive, so that equal numbers have equal bytes."""
    return x.to(torch.float8_e4m3fn).to(torch.float16) + 0.0


def fp8_tokens(x: torch.Tensor) -> Operand:
    """Quantize tokens to FP8: `scale = max|x| / 448`, `x / scale` rounded to E4M3.

    A token of zeros, or one so small that its scale would be denormal, gets scale 0 and dequantizes to zeros."""
    top = x.abs().amax(-1)
    scale = top / torch.full_like(top, LARGEST)  # a tensor: CUDA divides by a number via its rounded inverse
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
    code = x / torch.where(scale == 0, 1.0, scale)[..., None]
    return Operand(to_fp8(code), scale)


@dataclass(frozen=True)
class Fp8Format(TokenScales):
    """FP8: one byte per value, one fp32 scale per token. A stored token never changes."""

    name = "fp8"
    integer = False
    fp8 = True

    def tensors(self, geo: Geometry, window: Window, dim: int) -> dict[str, TensorSpec]:
        shape = (geo.batch, geo.heads, geo.blocks)
        codes = (dim, window.block) if self.transposed else (window.block, dim)
        return {
            "codes": TensorSpec((*shape, *codes), torch.uint8, block_dim=2),
            "scale": TensorSpec((*shape, window.block), torch.float32, block_dim=2),
            **self.constants(geo),
        }

    def quantize_tokens(self, new: Arrival, state: State) -> Operand:
        if not self.static:
            return fp8_tokens(new.x)
        scale = self.static_scale(new.x, state)
        return Operand(to_fp8((new.x / scale[..., None]).clamp(-LARGEST, LARGEST)), scale)

    def write(self, state: State, block: Block) -> None:
        codes = block.tokens.x.to(torch.float8_e4m3fn).view(torch.uint8)
        codes = codes.transpose(-1, -2) if self.transposed else codes
        write_rows(state["codes"], block.index, block.write, codes)
        write_rows(state["scale"], block.index, block.write, block.tokens.scales)

    def put(self, state: State, tokens: Operand, block: int, at: int) -> None:
        codes = state["codes"].mT if self.transposed else state["codes"]
        codes[:, :, block, at].copy_(tokens.x[:, :, 0].to(torch.float8_e4m3fn).view(torch.uint8))
        state["scale"][:, :, block, at].copy_(tokens.scales[:, :, 0])

    def read(self, state: State, blocks: int) -> Operand:
        codes = state["codes"][:, :, :blocks].view(torch.float8_e4m3fn).to(torch.float16)
        return Operand(codes.transpose(-1, -2) if self.transposed else codes, state["scale"][:, :, :blocks])
