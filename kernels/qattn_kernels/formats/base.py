"""Interface of a format: how it quantizes, stores and dequantizes the keys or values of a layer.

Until its block closes, a token is open: stored in the ring, or in the arena if the format has no ring.
`quantize_tokens` brings new tokens into that open form, `write` packs a full block, and `read` dequantizes packed
blocks as far as a product needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from importlib.util import find_spec
from typing import ClassVar, NamedTuple, final

import torch

from qattn_kernels.formats.side import Side
from qattn_kernels.layout import Geometry, State, TensorSpec, Window

FP16_MAX = torch.finfo(torch.float16).max
LARGEST_DENORMAL = torch.finfo(torch.float32).tiny * (1 - 2**-23)  # the fp32 number before the smallest normal one
INT8_LEVELS = 119  # headroom below 127: dequantizing FlashQ's second stage then stays inside INT8


class Operand(NamedTuple):
    """Keys or values as operand of a product. `x * scale[..., None] + mean` gives the numbers.

    Attributes:
        x: `[..., tokens, D]`: INT8 codes, FP8 numbers in fp16, or floating point numbers.
        scale: fp32 `[..., tokens]`, value of one code unit of a token; None if `x` are numbers.
        mean: fp32 `[..., n, 1, D]` for blocks `[..., n, block, D]`, the mean that smoothing subtracted; None without
            smoothing.
    """

    x: torch.Tensor
    scale: torch.Tensor | None
    mean: torch.Tensor | None = None

    @property
    def scales(self) -> torch.Tensor:
        """The scales `[..., tokens]`. Requires an operand with scales."""
        assert self.scale is not None
        return self.scale

    def scaled(self) -> Operand:
        """Return this operand with scales, 1 if it has none."""
        return self if self.scale is not None else self._replace(scale=self.x.new_ones(self.x.shape[:-1]).float())

    def centered(self) -> Operand:
        """Return this operand with a mean, 0 if it has none."""
        if self.mean is not None:
            return self
        return self._replace(mean=self.x.new_zeros((*self.x.shape[:-2], 1, self.x.shape[-1]), dtype=torch.float32))

    def dequantize(self) -> torch.Tensor:
        """Return the numbers `[..., tokens, D]` in fp32: `code * scale + mean`."""
        x = self.x.float()
        x = x if self.scale is None else x * self.scale[..., None]
        return x if self.mean is None else x + self.mean

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Operand:
        """Apply `move` to codes, scales and means, for example an index or a reshape.

        `move` receives `[..., tokens, D]`, `[..., tokens, 1]` and `[..., 1, D]`."""
        scale = None if self.scale is None else move(self.scale[..., None])[..., 0]
        return Operand(move(self.x), scale, None if self.mean is None else move(self.mean))


@dataclass(frozen=True)
class Arrival:
    """The new keys or values of a call, and the state of each row before the call.

    Attributes:
        x: fp32 `[B, H, T, D]`, real tokens first in each row; zeros after them and for non-finite tokens.
        real: bool `[B, T]`, false for padding.
        length: `[B]`, tokens of the row before the call.
        count: `[B]`, new real tokens.
        block: tokens per block.
    """

    x: torch.Tensor
    real: torch.Tensor
    length: torch.Tensor
    count: torch.Tensor
    block: int


@dataclass(frozen=True)
class Block:
    """One block of every row, ready to be written to the arena.

    Attributes:
        tokens: `[B, H, block, D]`, output of `Format.quantize_tokens`.
        keep: bool `[B, H, block]`, false for tokens that must not widen a scale: masked tokens and sinks.
        index: `[B]`, index of the block in the arena.
        write: bool `[B]`, rows that write the block.
    """

    tokens: Operand
    keep: torch.Tensor
    index: torch.Tensor
    write: torch.Tensor


class FixedBy(IntEnum):
    """The event that fixes a state tensor of a row once: its first closed block, or its first `Window.block` tokens."""

    BLOCK = 0
    TOKENS = 1


@dataclass(frozen=True)
class Format:
    """A format of keys or values. Frozen: fields are settings, and tensors live in the layer's state.

    A `windowed` format keeps tokens in an open form in a ring until their block closes. Any other format packs each
    token on arrival.

    Attributes:
        windowed: tokens wait in a ring until their block closes.
        integer: operands are INT8 with one scale per token, for integer products; otherwise floating point.
        fp8: codes are FP8. GPUs below compute capability 8.9 convert them by shifts (`launch.constants.Sizes`).
        block_scales: a prefill sees closed blocks with one scale each.
        row_weights: a prefill rounds the weights of a row once, because the values of a block share a scale.
        in_model_precision: the format stores bf16, fp16 or fp32 without quantization.
        transposed: codes of blocks and ring are stored `[D, tokens]`, the layout that the product with values reads.
    """

    named: ClassVar[dict[str, type[Format]]] = {}  # every imported class that gives itself a name
    name: ClassVar[str]
    windowed: ClassVar[bool] = False
    integer: ClassVar[bool] = True
    fp8: ClassVar[bool] = False
    block_scales: ClassVar[bool] = False
    row_weights: ClassVar[bool] = False
    in_model_precision: ClassVar[bool] = False

    transposed: bool = False

    def __init_subclass__(cls) -> None:
        """Make a class known under the name that it defines, wherever the class is.

        Raises:
            TypeError: another module has a format of this name.
        """
        if (name := vars(cls).get("name")) is None:
            return
        own = f"qattn_kernels.formats.{name}"
        home = f"{own}.reference" if find_spec(own) else Format.named.get(name, cls).__module__
        if cls.__module__ != home:
            raise TypeError(f"{home} has a format named {name!r}. Fix: give {cls.__qualname__} another name")
        Format.named[name] = cls

    @property
    def core(self) -> Format:
        """The format that holds the codes: this format, or the one it wraps (`smoothed`)."""
        return self

    @property
    def smoothed(self) -> bool:
        """Whether a row's mean is subtracted before quantization."""
        return self.core is not self

    @property
    def coded(self) -> bool:
        """Whether the format stores integer codes. Default: if its operands are integers."""
        return self.integer

    @property
    def exact_prompts(self) -> bool:
        """Whether an unquantized prefill sees new tokens exactly as the model produced them."""
        return False

    @property
    def fixed(self) -> dict[str, FixedBy]:
        """State tensors `[B, ...]` by name that a row fixes once, with the event that fixes each. Zeros until then."""
        return {}

    @property
    def label(self) -> str:
        """Name of the format in reports."""
        return self.name

    @classmethod
    @lru_cache(maxsize=256)  # every layer asks at every step
    def keeps(cls, shortcut: str, operation: str) -> bool:
        """Return whether a method or property may replace an operation. It may not if the format has none, or if a
        subclass overrides the operation alone."""
        owner = next(base for base in cls.__mro__ if shortcut in vars(base) or operation in vars(base))
        return owner is not Format and shortcut in vars(owner)

    def tensors(self, geo: Geometry, window: Window, dim: int) -> dict[str, TensorSpec]:
        """Return the tensors that this format adds to the layer's state. `dim` is the head dimension of its side.

        A tensor without a batch dimension is a constant of the model, set from outside."""
        raise NotImplementedError

    def ring_tensors(self, geo: Geometry, slots: int, dim: int) -> dict[str, TensorSpec]:
        """Return the tensors of a windowed format's ring of `slots` tokens: `ring`, and `ring_scale` if the ring is
        INT8."""
        raise NotImplementedError

    def ring(self, state: State) -> Operand:
        """Return the ring's tokens `[B, H, slots, D]` as views of the state. Writing to the result writes to the
        ring."""
        codes = state["ring"]
        return Operand(codes.transpose(-1, -2) if self.transposed else codes, state.get("ring_scale"))

    @property
    def token_levels(self) -> int | None:
        """Largest INT8 code of open tokens, if `quantize_tokens` is `int8_tokens` and no more; else None."""
        return None

    def quantize_tokens(self, new: Arrival, state: State) -> Operand:
        """Quantize new tokens `[B, H, T, D]` one by one to their open form. May fix scales of the row in `state`."""
        if self.token_levels is None:
            raise NotImplementedError
        return int8_tokens(new.x, self.token_levels)

    def requantize(self, x: torch.Tensor) -> Operand:
        """Quantize fp32 numbers `[..., block, D]` as `quantize_tokens` does. A wrapping format (`smoothed`) has
        subtracted a mean from them."""
        raise NotImplementedError

    def block_form(self, tokens: Operand, state: State) -> Operand:
        """Return full blocks of new tokens, `[B, H, n, block, D]`, in the form that a prefill multiplies.

        Default: the output of `quantize_tokens`."""
        return tokens

    def write(self, state: State, block: Block) -> None:
        """Quantize and store one block of every row with `block.write` true."""
        raise NotImplementedError

    def put(self, state: State, tokens: Operand, block: int, at: int) -> None:
        """Store one token of every row, `[B, H, 1, D]`, as token `at` of block `block`; for formats without a ring."""
        raise NotImplementedError

    def read(self, state: State, blocks: int) -> Operand:
        """Return the first `blocks` blocks `[B, Hkv, blocks, block, D]`, dequantized as far as a product needs."""
        raise NotImplementedError

    def bits_per_head(self, state: State, heads: int) -> list[list[int]]:
        """Return the bits per code of each head in each row, `[B][Hkv]`; 0 while undecided.

        Codes that are not packed are bytes."""
        return [[self.kernel_bits(heads) or 8] * heads for _ in range(state["codes"].shape[0])]

    def clamped_scales(self, state: State) -> torch.Tensor | None:
        """Return int64 `[B, Hkv, blocks]`: fp16 scales and zero points per block at the end of the fp16 range, or None.

        `write` clamps larger magnitudes to that end. None means that the format stores nothing in fp16. The count comes
        from the stored bytes alone, so kernels and reference agree on it, and a crop takes it back."""
        return None

    def kernel_limits(self, side: str, dim: int) -> str | None:
        """Return why kernels cannot use the format as `side` (`k` or `v`) with this head dimension, or None."""
        return None

    def kernel_bits(self, heads: int) -> int:
        """Return the bits per packed code if all heads share them, else 0."""
        return 0

    def side(self, heads: int, dim: int, block: int, values: bool) -> Side:
        """Return the compile-time constants of kernels for one side with `heads` heads, head dimension `dim` and
        `block` tokens per block."""
        bits = self.kernel_bits(heads)
        return Side(values, dim, 1 << (dim - 1).bit_length(), self.integer, (bits,), bits)

    def asks_registers(self, heads: int) -> bool:
        """Return whether decode kernels run faster if the compiler may use all registers. Both sides must agree."""
        return False

    def decode_warps(self, dim: int, block: int, columns: int) -> int:
        """Return the minimum warps whose registers hold the data of one decode program.

        `dim`: head dimension. `block`: tokens per block. `columns`: columns of queries."""
        return 1

    def of_process(self, own: range, size: int) -> Format:
        """Return this format for the process with the KV heads `own`, one of `size` processes.

        Raises:
            ValueError: if heads of different bit widths do not divide among the processes.
        """
        return self

    @final  # final: crop kernels rely on `fixed` alone
    def cropped(self, state: State, window: Window, length: torch.Tensor, closed: torch.Tensor) -> None:
        """Reset tensors that were fixed by tokens a crop removed. `length` and `closed` `[B]` describe the rows after
        the crop."""
        unset = {FixedBy.BLOCK: closed == 0, FixedBy.TOKENS: length < window.block}
        for name, by in self.fixed.items():
            x = state[name]
            x.masked_fill_(unset[by].view(-1, *[1] * (x.dim() - 1)), 0)


class OpenFormat(Format):
    """A format with an unquantized ring (bf16/fp16/fp32): it quantizes tokens when their block closes."""

    windowed = True

    @property
    def exact_prompts(self) -> bool:
        return type(self).block_form is Format.block_form

    def ring_tensors(self, geo: Geometry, slots: int, dim: int) -> dict[str, TensorSpec]:
        return {"ring": TensorSpec((geo.batch, geo.heads, slots, dim), geo.dtype)}

    def quantize_tokens(self, new: Arrival, state: State) -> Operand:
        return Operand(new.x.to(state["ring"].dtype), None)


def int8_ring(geo: Geometry, slots: int, dim: int, transposed: bool = False) -> dict[str, TensorSpec]:
    """Return the tensors of a ring of INT8 tokens with one fp32 scale each."""
    codes = (dim, slots) if transposed else (slots, dim)
    return {
        "ring": TensorSpec((geo.batch, geo.heads, *codes), torch.int8),
        "ring_scale": TensorSpec((geo.batch, geo.heads, slots), torch.float32),
    }


def int8_tokens(x: torch.Tensor, levels: int | torch.Tensor = INT8_LEVELS) -> Operand:
    """Quantize to symmetric INT8 with one scale per token: `scale = max|x| / levels`, `code = round(x / scale)`.

    `levels` may be a tensor that broadcasts to the tokens.

    An all-zero token gets scale 0, which never raises a block's scale. It dequantizes to zeros. No code exceeds
    `levels`, because a scale errs by half of its last bit only."""
    top = x.abs().amax(-1)
    # a tensor: CUDA divides by a number via its rounded inverse
    scale = top / (levels if isinstance(levels, torch.Tensor) else torch.full_like(top, levels))
    scale = torch.threshold(scale, LARGEST_DENORMAL, 0.0)  # codes of a denormal scale would overflow
    return Operand(torch.round(x / torch.threshold(scale, 0.0, 1.0)[..., None]).to(torch.int8), scale)


def at_fp16_max(stored: torch.Tensor) -> torch.Tensor:
    """Return int64 `[B, H, NB]`: the count of a block's fp16 numbers `[B, H, NB, ...]` with the largest fp16
    magnitude."""
    return (stored.abs() == FP16_MAX).flatten(3).sum(-1)


def write_rows(arena: torch.Tensor, index: torch.Tensor, write: torch.Tensor, values: torch.Tensor) -> None:
    """Set `arena[b, :, index[b]] = values[b]` for rows with `write` true. `arena` is `[B, H, NB, ...]`."""
    known = write.tolist() if write.device.type == "cpu" else None  # on a CPU the host can look without waiting
    if known is not None and not any(known):
        return
    rows = torch.arange(arena.shape[0], device=arena.device)
    if known is not None and all(known):
        arena[rows, :, index] = values.to(arena.dtype)
        return
    kept = arena[rows, :, index]
    mask = write.view(-1, *[1] * (values.dim() - 1))
    arena[rows, :, index] = torch.where(mask, values.to(arena.dtype), kept)
