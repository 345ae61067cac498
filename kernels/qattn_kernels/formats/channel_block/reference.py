"""Base of formats with one scale per token and block of channels, and an unquantized ring (bf16/fp16/fp32)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from qattn_kernels.formats.base import Block, OpenFormat, Operand, write_rows
from qattn_kernels.formats.packed import pack, unpack
from qattn_kernels.formats.scales import from_bits
from qattn_kernels.formats.side import Side
from qattn_kernels.layout import Geometry, State, TensorSpec, Window

LEAST_GROUP = 32  # minimum channels of an integer product


@dataclass(frozen=True)
class ChannelBlockFormat(OpenFormat):
    """Base: codes of `bits` bits, `value = level * scale` with a 16-bit scale for `group(D)` channels of a token.

    Attributes:
        bits: bits per code. 8-bit codes are stored as INT8, smaller ones packed (`pack`).
        for_values: codes are stored `[D, tokens]`, the layout that the product with values reads.
    """

    bits: int = 4
    for_values: bool = False

    integer = False

    def kernel_limits(self, side: str, dim: int) -> str | None:
        if self.group(dim) >= LEAST_GROUP:
            return None
        return f"{self.group(dim)} channels share a norm at head dim {dim}; the kernels know {LEAST_GROUP} and more"

    def kernel_bits(self, heads: int) -> int:
        return self.bits

    def side(self, heads: int, dim: int, block: int, values: bool) -> Side:
        return super().side(heads, dim, block, values)._replace(CHANNELS=self.group(dim))

    def group(self, dim: int) -> int:
        """Return the number of channels that share a scale. The last group of a head may be short."""
        raise NotImplementedError

    def encode(self, x: torch.Tensor, channels: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize fp32 groups `[..., groups, group]`: returns codes in [0, 2^bits), or INT8, and scales in stored
        form.

        `channels`: fp32 `[groups]`, the channels of each group if the last group is short; zeros follow them."""
        raise NotImplementedError

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of stored scales. int16 holds the bits of `formats/scales.py`."""
        return torch.int16

    def scales(self, stored: torch.Tensor) -> torch.Tensor:
        """Return fp32 scales from stored ones."""
        return from_bits(stored)

    def levels(self, code: torch.Tensor) -> torch.Tensor:
        """Return the fp32 level of each code."""
        raise NotImplementedError

    def shuffle(self, packed: torch.Tensor) -> torch.Tensor:
        """Return packed codes in memory order. Default: the order of `pack`."""
        return packed

    def unshuffle(self, codes: torch.Tensor) -> torch.Tensor:
        """Return codes from memory in the order of `unpack`, the inverse of `shuffle`."""
        return codes

    def tensors(self, geo: Geometry, window: Window, dim: int) -> dict[str, TensorSpec]:
        rows, block = (geo.batch, geo.heads, geo.blocks), window.block
        tokens, groups = block * self.bits // 8, -(-dim // self.group(dim))
        codes = (dim, tokens) if self.for_values else (tokens, dim)
        return {
            "codes": TensorSpec((*rows, *codes), torch.int8 if self.bits == 8 else torch.uint8, block_dim=2),
            "scale": TensorSpec((*rows, groups, block), self.scale_dtype, block_dim=2),
        }

    def write(self, state: State, block: Block) -> None:
        x = block.tokens.x.float()
        group, dim = self.group(x.shape[-1]), x.shape[-1]
        padded = torch.nn.functional.pad(x, (0, -dim % group)).unflatten(-1, (-1, group))
        starts = torch.arange(0, dim, group, device=x.device)
        code, scale = self.encode(padded, (dim - starts).clamp(max=group).float() if dim % group else None)
        code = code.flatten(-2)[..., :dim]
        code = code if self.bits == 8 else pack(code, self.bits)
        code = code.transpose(-1, -2) if self.for_values else code
        write_rows(state["codes"], block.index, block.write, self.shuffle(code))
        write_rows(state["scale"], block.index, block.write, scale.transpose(-1, -2))

    def read(self, state: State, blocks: int) -> Operand:
        codes = self.unshuffle(state["codes"][:, :, :blocks])
        codes = codes.transpose(-1, -2) if self.for_values else codes
        level = self.levels(codes if self.bits == 8 else unpack(codes, self.bits))
        dim = level.shape[-1]
        scale = self.scales(state["scale"][:, :, :blocks]).transpose(-1, -2).repeat_interleave(self.group(dim), -1)
        return Operand((level * scale[..., :dim]).to(state["ring"].dtype), None)


@dataclass(frozen=True)
class CodebookFormat(ChannelBlockFormat):
    """Base: codes of 2 to 4 bits number the levels of a table from the lowest.

    Levels are INT8 in units of `unit`, so that integer products with them are exact."""

    unit: ClassVar[float]

    def table(self) -> tuple[int, ...]:
        """Return the INT8 level of each code."""
        raise NotImplementedError

    def integers(self, code: torch.Tensor) -> torch.Tensor:
        """Return the INT8 levels of codes, in fp32."""
        return _on_device(self.table(), code.device)[code.long()]

    def levels(self, code: torch.Tensor) -> torch.Tensor:
        return self.integers(code) * self.unit

    def shuffle(self, packed: torch.Tensor) -> torch.Tensor:
        """Shuffle packed codes: of four neighbouring bytes, the lower halves come first, then the upper halves.

        A lookup takes the four codes in half a word at once (`formats/codebook.py`)."""
        one, other = packed[..., 0::2], packed[..., 1::2]
        halves = torch.stack(((one & 15) | (other & 15) << 4, (one >> 4) | (other & 240)), -2)
        return halves.unflatten(-1, (-1, 2)).transpose(-2, -3).flatten(-3)

    def unshuffle(self, codes: torch.Tensor) -> torch.Tensor:
        """Undo `shuffle`: 0x21, 0x43, 0xba, 0xdc become 0xa1, 0xb2, 0xc3, 0xd4."""
        low, high = codes.unflatten(-1, (-1, 2, 2)).transpose(-2, -3).flatten(-2).unbind(-2)
        one, other = (low & 15) | (high & 15) << 4, (low >> 4) | (high & 240)
        return torch.stack((one, other), -1).flatten(-2)


@lru_cache(maxsize=64)
def _on_device(table: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the levels in fp32, cached, so that a captured step copies nothing from the host."""
    with torch.inference_mode(False):
        return torch.tensor(table, dtype=torch.float32, device=device)
