"""The contract of a format: how keys or values of a layer are quantized, stand in memory, and are dequantized.

A token is open, as a format holds it in its ring (or, without a ring, in the arena), until its block closes.
`quantize_tokens` makes that form of new tokens, `write` closes a block, `read` dequantizes closed blocks as far as a
product needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, NamedTuple, final

import torch

from qattn_kernels.formats.side import Side
from qattn_kernels.layout import Geometry, State, TensorSpec, Window

FP16_MAX = torch.finfo(torch.float16).max
INT8_LEVELS = 119  # not 127: the head room lets FlashQ's second stage be dequantized without leaving INT8


class Operand(NamedTuple):
    """Keys or values in the form that a product takes: `x * scale[..., None] + mean` are the numbers.

    Attributes:
        x: `[..., tokens, D]`: INT8 codes, FP8's numbers in fp16, or numbers in floating point.
        scale: fp32 `[..., tokens]`, what one unit of a token's codes is worth; None where `x` are numbers.
        mean: fp32 `[..., n, 1, D]` of blocks `[..., n, block, D]`, what smoothing subtracted; None without smoothing.
    """

    x: torch.Tensor
    scale: torch.Tensor | None
    mean: torch.Tensor | None = None

    @property
    def scales(self) -> torch.Tensor:
        """The scales `[..., tokens]` of an operand that has some."""
        assert self.scale is not None
        return self.scale

    def scaled(self) -> Operand:
        """This operand with scales: of one where it has none."""
        return self if self.scale is not None else self._replace(scale=self.x.new_ones(self.x.shape[:-1]).float())

    def centered(self) -> Operand:
        """This operand with a mean: of zero where it has none."""
        if self.mean is not None:
            return self
        return self._replace(mean=self.x.new_zeros((*self.x.shape[:-2], 1, self.x.shape[-1]), dtype=torch.float32))

    def dequantize(self) -> torch.Tensor:
        """The numbers `[..., tokens, D]` in fp32: `code * scale + mean`."""
        x = self.x.float()
        x = x if self.scale is None else x * self.scale[..., None]
        return x if self.mean is None else x + self.mean

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Operand:
        """This operand with its codes, scales and means moved alike, as by an index or a reshape.

        `move` is called with `[..., tokens, D]`, `[..., tokens, 1]` and `[..., 1, D]`.
        """
        scale = None if self.scale is None else move(self.scale[..., None])[..., 0]
        return Operand(move(self.x), scale, None if self.mean is None else move(self.mean))


@dataclass(frozen=True)
class Arrival:
    """The new keys or values of a call, and what each row was before it.

    Attributes:
        x: fp32 `[B, H, T, D]`, real tokens first in each row; zeros behind them and for tokens that are not finite.
        real: bool `[B, T]`, which tokens are no padding.
        length: `[B]`, tokens of the row before the call.
        count: `[B]`, new real tokens.
        block: tokens of a block.
    """

    x: torch.Tensor
    real: torch.Tensor
    length: torch.Tensor
    count: torch.Tensor
    block: int


@dataclass(frozen=True)
class Block:
    """One block of every row on its way into the arena.

    Attributes:
        tokens: `[B, H, block, D]` as `Format.quantize_tokens` made them.
        keep: bool `[B, H, block]`, false for tokens that must not widen a scale: masked ones and sinks.
        index: `[B]`, the block's place in the arena.
        write: bool `[B]`, rows in which it is written.
    """

    tokens: Operand
    keep: torch.Tensor
    index: torch.Tensor
    write: torch.Tensor


class FixedBy(IntEnum):
    """What of a row fixes a state tensor, once: its first closed block, or its first `Window.block` tokens."""

    BLOCK = 0
    TOKENS = 1


@dataclass(frozen=True)
class Format:
    """A format of keys or values. Frozen: its fields are its settings, its tensors live in the layer's state.

    A `windowed` format keeps tokens in an open form in a ring until their block closes; any other writes each token
    in its final form at once.

    Attributes:
        integer: its operands are INT8 with a scale a token, fit for products of integers; else floating point.
        fp8: its codes are FP8, which GPUs know from compute capability 8.9 on.
        block_scales: a prefill sees closed blocks with one scale each.
        row_weights: a prefill rounds the weights of a row once, since the values of a block share a scale.
        in_model_precision: nothing is quantized.
        transposed: codes of blocks and ring lie `[D, tokens]`, as the product with values wants them.
    """

    name: ClassVar[str]
    windowed: ClassVar[bool] = False
    integer: ClassVar[bool] = True
    fp8: ClassVar[bool] = False
    block_scales: ClassVar[bool] = False
    row_weights: ClassVar[bool] = False
    in_model_precision: ClassVar[bool] = False

    transposed: bool = False

    @property
    def core(self) -> Format:
        """The format that holds the codes: itself, or the one that it wraps (`smoothed`)."""
        return self

    @property
    def smoothed(self) -> bool:
        """Whether a row's mean is subtracted before codes are made."""
        return self.core is not self

    @property
    def coded(self) -> bool:
        """Whether it holds codes of integers: by default where its operands are integers."""
        return self.integer

    @property
    def exact_prompts(self) -> bool:
        """Whether a prefill in the model's precision sees new tokens as the model made them."""
        return False

    @property
    def fixed(self) -> dict[str, FixedBy]:
        """State tensors of a row, `[B, ...]` by name, that it fixes once, and by what; zeros until then."""
        return {}

    @property
    def label(self) -> str:
        """Its name in reports."""
        return self.name

    def tensors(self, geo: Geometry, window: Window, dim: int) -> dict[str, TensorSpec]:
        """The tensors this format adds to the layer's state, `dim` being the head dim of its side. One that no row has
        of its own is a constant of the model, which the layer is given."""
        raise NotImplementedError

    def ring_tensors(self, geo: Geometry, slots: int, dim: int) -> dict[str, TensorSpec]:
        """The tensors of a windowed format's ring of `slots` tokens: `ring`, and `ring_scale` if it holds INT8."""
        raise NotImplementedError

    def ring(self, state: State) -> Operand:
        """The ring's tokens `[B, H, slots, D]`: views of the state, so that writing to them writes to the ring."""
        codes = state["ring"]
        return Operand(codes.transpose(-1, -2) if self.transposed else codes, state.get("ring_scale"))

    def quantize_tokens(self, new: Arrival, state: State) -> Operand:
        """Quantize new tokens one by one: `[B, H, T, D]` in the form that they have until their block closes.

        It may fix scales of the row in `state`.
        """
        raise NotImplementedError

    def requantize(self, x: torch.Tensor) -> Operand:
        """fp32 numbers `[..., block, D]`, from which a wrapping format took a mean, in the form that `quantize_tokens`
        makes."""
        raise NotImplementedError

    def block_form(self, tokens: Operand, state: State) -> Operand:
        """The form in which a prefill multiplies full blocks of new tokens, `[B, H, n, block, D]`: by default as
        `quantize_tokens` made them."""
        return tokens

    def write(self, state: State, block: Block) -> None:
        """Quantize and store one block of every row for which `block.write` holds."""
        raise NotImplementedError

    def read(self, state: State, blocks: int) -> Operand:
        """The first `blocks` blocks `[B, Hkv, blocks, block, D]`, dequantized as far as a product needs it."""
        raise NotImplementedError

    def bits_per_head(self, state: State, heads: int) -> list[list[int]]:
        """Bits of a code of each head, for each row: `[B][Hkv]`; 0 where that is not decided yet."""
        raise NotImplementedError

    def clamped_scales(self, state: State) -> torch.Tensor | None:
        """int64 `[B, Hkv, blocks]`: how many fp16 scales and zero points of each block stand at the end of its range,
        to which `write` clamps what lies beyond. None: nothing is in fp16.

        The stored bytes alone give the count, so kernels and reference count alike, and a crop takes the count back.
        """
        return None

    def kernel_limits(self, side: str, dim: int) -> str | None:
        """Why kernels cannot take it as `k` or `v` of this head dim, or None."""
        return None

    def kernel_bits(self, heads: int) -> int:
        """Bits of a packed code, if all heads have as many; else 0."""
        return 0

    def side(self, heads: int, dim: int, block: int, values: bool) -> Side:
        """What kernels are compiled for of a side with so many heads, this head dim and blocks of so many tokens."""
        bits = self.kernel_bits(heads)
        return Side(values, dim, 1 << (dim - 1).bit_length(), self.integer, (bits,), bits)

    def asks_registers(self, heads: int) -> bool:
        """Whether decode kernels of it, on both sides, are faster if the compiler is told to use all registers."""
        return False

    def decode_warps(self, dim: int, block: int, columns: int) -> int:
        """Warps whose registers hold what a program of a decode has of a head dim, of blocks of so many tokens and of
        so many columns of queries; at least."""
        return 1

    def of_process(self, own: range, size: int) -> Format:
        """The part of a process that has the KV heads `own`, of `size` processes.

        Raises:
            ValueError: if the heads of different bits do not divide among the processes.
        """
        return self

    @final  # kernels that take tokens back know `fixed` alone
    def cropped(self, state: State, window: Window, length: torch.Tensor, closed: torch.Tensor) -> None:
        """Unset what tokens fixed that a crop took away; `length`, `closed` `[B]` are what is left of each row."""
        unset = {FixedBy.BLOCK: closed == 0, FixedBy.TOKENS: length < window.block}
        for name, by in self.fixed.items():
            x = state[name]
            x.masked_fill_(unset[by].view(-1, *[1] * (x.dim() - 1)), 0)


class OpenFormat(Format):
    """A format whose tokens stand open in a ring in the model's precision until their block closes."""

    windowed = True

    @property
    def exact_prompts(self) -> bool:
        return type(self).block_form is Format.block_form

    def ring_tensors(self, geo: Geometry, slots: int, dim: int) -> dict[str, TensorSpec]:
        return {"ring": TensorSpec((geo.batch, geo.heads, slots, dim), geo.dtype)}

    def quantize_tokens(self, new: Arrival, state: State) -> Operand:
        return Operand(new.x.to(state["ring"].dtype), None)


def int8_ring(geo: Geometry, slots: int, dim: int, transposed: bool = False) -> dict[str, TensorSpec]:
    """A ring of INT8 tokens with one scale each."""
    codes = (dim, slots) if transposed else (slots, dim)
    return {
        "ring": TensorSpec((geo.batch, geo.heads, *codes), torch.int8),
        "ring_scale": TensorSpec((geo.batch, geo.heads, slots), torch.float32),
    }


def int8_tokens(x: torch.Tensor, levels: int = INT8_LEVELS) -> Operand:
    """Symmetric INT8 with one scale a token: `scale = max|x| / levels`, `code = round(x / scale)`.

    A token of zeros has scale 0, so that it never raises the scale of a block; it dequantizes to zeros all the same.
    """
    top = x.abs().amax(-1)
    scale = top / torch.full_like(top, levels)  # by a number, CUDA would multiply by its rounded inverse
    # a denormal scale would overflow its codes
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
    divisor = torch.where(scale == 0, 1.0, scale)
    return Operand(torch.round(x / divisor[..., None]).clamp(-levels, levels).to(torch.int8), scale)


def at_fp16_max(stored: torch.Tensor) -> torch.Tensor:
    """How many of the fp16 numbers `[B, H, NB, ...]` of each block are the largest or the smallest: `[B, H, NB]`."""
    return (stored.abs() == FP16_MAX).flatten(3).sum(-1)


def write_rows(arena: torch.Tensor, index: torch.Tensor, write: torch.Tensor, values: torch.Tensor) -> None:
    """`arena[b, :, index[b]] = values[b]` for the rows where `write` holds. arena `[B, H, NB, ...]`."""
    rows = torch.arange(arena.shape[0], device=arena.device)
    kept = arena[rows, :, index]
    mask = write.view(-1, *[1] * (values.dim() - 1))
    arena[rows, :, index] = torch.where(mask, values.to(arena.dtype), kept)
