"""Optional features of formats: mix-ins, and helpers that query them on any format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch

from qattn_kernels.formats.base import Format
from qattn_kernels.layout import Geometry, State, TensorSpec


class Low(IntEnum):
    """Which heads of a side have 2 bits: none, all, those in a recipe's list, or those ranked lowest in each row."""

    NONE = 0
    ALL = 1
    LISTED = 2
    RANKED = 3


class Span(NamedTuple):
    """Blocks `first` to `end` (exclusive) of a row, whose codes have `bits` bits."""

    bits: int
    first: int
    end: int


def pieces(old: list[Span], new: list[Span]) -> Iterator[tuple[Span, Span, slice, slice, slice]]:
    """Yield the runs of blocks inside one span of each list.

    Each item is `(old span, new span, run in the row, run in the old span, run in the new span)`."""
    for one in old:
        for other in new:
            first, end = max(one.first, other.first), min(one.end, other.end)
            if first < end:
                own, theirs = (slice(first - span.first, end - span.first) for span in (one, other))
                yield one, other, slice(first, end), own, theirs


class MixedHeads:
    """A format whose heads can have different bit widths. Its tensor `head_of` records where each head is stored."""

    @property
    def mixed(self) -> bool:
        """Whether heads have different bit widths."""
        raise NotImplementedError

    @property
    def least_heads(self) -> int:
        """Minimum number of KV heads of a layer."""
        raise NotImplementedError

    def low_kind(self, heads: int) -> Low:
        """Return which of `heads` heads get 2 bits."""
        raise NotImplementedError

    def settled(self, heads: int) -> dict[str, list[int]]:
        """Return row tensors `[Hkv]` by name that the first closed block always sets to these values."""
        raise NotImplementedError

    def places_known(self, state: State, closed: torch.Tensor) -> bool:
        """Return whether `head_of` lists every head exactly once in each row with a packed block.

        A saved file must pass this check, because kernels use places as addresses. `closed` `[B]`: packed blocks."""
        raise NotImplementedError


class AgedBlocks:
    """A format that can store a row's first blocks with half the bits of the others."""

    aged: int | None  # number of blocks with half the bits; None if the format never ages blocks

    @property
    def ages(self) -> bool:
        """Whether a row's first blocks have, or will have, half the bits of the others."""
        return self.aged is not None

    def spans(self, blocks: int) -> list[Span]:
        """Return the runs of equal bit width among a row's `blocks` blocks."""
        raise NotImplementedError

    def with_bits(self, bits: int, aged: int | None) -> Format:
        """Return this format with `bits` bits per code, and half of them in a row's first `aged` blocks. None: never
        age blocks."""
        raise NotImplementedError

    def recode(self, state: State, new: AgedBlocks, out: State, keep: torch.Tensor, closed: torch.Tensor) -> None:
        """Repack the blocks of `state` into `out` for the format `new`, which has fewer bits.

        All other tensors of `out` must already equal those of `state`.

        Args:
            state: the layer's tensors in this format.
            new: the format to write.
            out: tensors in the format `new`.
            keep: bool `[B, H, blocks, block]`, tokens that widen the range of their channels.
            closed: bool `[B, blocks]`, blocks that hold tokens.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class TokenScales(Format):
    """Base of formats with one scale per token.

    Attributes:
        static: all tokens of a head have one scale, which the model's checkpoint gives: the tensor `static`.
    """

    static: bool = False

    def constants(self, geo: Geometry) -> dict[str, TensorSpec]:
        """Return the tensor `static`, fp32 `[Hkv]`, if the format has it."""
        return {"static": TensorSpec((geo.heads,), torch.float32, batch_dim=None)} if self.static else {}

    def static_scale(self, x: torch.Tensor, state: State) -> torch.Tensor:
        """Return the static scale of every token, `[B, H, T]`, of tokens `[B, H, T, D]`."""
        return state["static"][:, None].expand(x.shape[:-1])

    def kernel_limits(self, side: str, dim: int) -> str | None:
        return "only the reference quantizes by a checkpoint's scales" if self.static else None


class Compensated:
    """A format that can let errors of a token's channels offset each other, weighted by its tensor `compensation`."""

    compensate: bool


def mixed_heads(fmt: Format) -> MixedHeads | None:
    """Return the format that holds the codes of `fmt`, if it can mix bit widths, else None."""
    return fmt.core if isinstance(fmt.core, MixedHeads) else None


def mixes(fmt: Format) -> bool:
    """Return whether heads have different bit widths."""
    mixed = mixed_heads(fmt)
    return mixed is not None and mixed.mixed


def low_kind(fmt: Format, heads: int) -> Low:
    """Return which of `heads` heads get 2 bits, for any format."""
    mixed = mixed_heads(fmt)
    return Low.NONE if mixed is None else mixed.low_kind(heads)


def least_heads(fmt: Format) -> int:
    """Return the minimum number of KV heads of a layer, for any format."""
    mixed = mixed_heads(fmt)
    return 1 if mixed is None else mixed.least_heads


def may_age(fmt: Format) -> AgedBlocks:
    """Return the format that holds the codes of `fmt`, if it can age blocks.

    Raises:
        TypeError: if its blocks always keep their bits.
    """
    if not isinstance(fmt.core, AgedBlocks):
        raise TypeError(f"blocks of {fmt.core.name} keep their bits")
    return fmt.core


def aged_blocks(fmt: Format) -> AgedBlocks | None:
    """Return the same as `may_age(fmt)` if the format ages blocks, else None."""
    return fmt.core if isinstance(fmt.core, AgedBlocks) and fmt.core.ages else None


def compensates(fmt: Format) -> bool:
    """Return whether errors of a token's channels offset each other."""
    return isinstance(fmt.core, Compensated) and fmt.core.compensate


def has_static_scales(fmt: Format) -> bool:
    """Return whether all tokens of a head share a scale that the model's checkpoint gives."""
    return isinstance(fmt.core, TokenScales) and fmt.core.static
