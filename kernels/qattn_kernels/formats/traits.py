"""What some formats have beside a `Format`: mix-ins, and how others ask for them."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch

from qattn_kernels.formats.base import Format
from qattn_kernels.layout import State


class Low(IntEnum):
    """Which heads of a side have 2 bits: none, all, those of a recipe's list, or those that each row ranks lowest."""

    NONE = 0
    ALL = 1
    LISTED = 2
    RANKED = 3


class Span(NamedTuple):
    """Blocks of a row, from `first` to before `end`, whose codes have `bits`."""

    bits: int
    first: int
    end: int


class MixedHeads:
    """A format whose heads may have different bits, and then lie apart: its tensor `head_of` says where."""

    @property
    def mixed(self) -> bool:
        """Whether heads have different bits."""
        raise NotImplementedError

    @property
    def least_heads(self) -> int:
        """How many KV heads a layer must have, at least."""
        raise NotImplementedError

    def low_kind(self, heads: int) -> Low:
        """Which of so many heads get 2 bits."""
        raise NotImplementedError

    def settled(self, heads: int) -> dict[str, list[int]]:
        """State tensors of a row, `[Hkv]` by name, that its first closed block sets to these values always."""
        raise NotImplementedError

    def places_known(self, state: State, closed: torch.Tensor) -> bool:
        """Whether `head_of` leads to each head's codes once, in rows of `closed` blocks each, `[B]`."""
        raise NotImplementedError


class AgedBlocks:
    """A format with which a row's first blocks may have half the bits of the others."""

    aged: int | None  # how many blocks have; None where none ever does

    @property
    def ages(self) -> bool:
        """Whether a row's first blocks have half the bits of the others, or will."""
        return self.aged is not None

    def spans(self, blocks: int) -> list[Span]:
        """The runs of a row's `blocks` blocks whose codes have as many bits."""
        raise NotImplementedError

    def with_bits(self, bits: int, aged: int | None) -> Format:
        """This format with blocks of so many bits, the first `aged` of a row with half as many; None: none ever."""
        raise NotImplementedError

    def recode(self, state: State, new: AgedBlocks, out: State, keep: torch.Tensor, closed: torch.Tensor) -> None:
        """Write the codes of the blocks of `state` to `out` as `new` has them, this format with fewer bits.

        Of the other tensors `out` holds those of `state` already.

        Args:
            keep: bool `[B, H, blocks, block]`, which tokens widen the range of their channels.
            closed: bool `[B, blocks]`, which blocks hold tokens.
        """
        raise NotImplementedError


class Compensated:
    """A format with which errors of a token's channels may make up for one another, as its tensor `compensation`
    says."""

    compensate: bool


def mixed_heads(fmt: Format) -> MixedHeads | None:
    """The format that holds the codes of `fmt`, if its heads may have different bits."""
    return fmt.core if isinstance(fmt.core, MixedHeads) else None


def mixes(fmt: Format) -> bool:
    """Whether heads have different bits."""
    mixed = mixed_heads(fmt)
    return mixed is not None and mixed.mixed


def low_kind(fmt: Format, heads: int) -> Low:
    """Which of so many heads get 2 bits, of any format."""
    mixed = mixed_heads(fmt)
    return Low.NONE if mixed is None else mixed.low_kind(heads)


def least_heads(fmt: Format) -> int:
    """How many KV heads a layer of any format must have, at least."""
    mixed = mixed_heads(fmt)
    return 1 if mixed is None else mixed.least_heads


def may_age(fmt: Format) -> AgedBlocks:
    """The format that holds the codes of `fmt`, whose first blocks may have half the bits.

    Raises:
        TypeError: they never do.
    """
    if not isinstance(fmt.core, AgedBlocks):
        raise TypeError(f"blocks of {fmt.core.name} keep their bits")
    return fmt.core


def aged_blocks(fmt: Format) -> AgedBlocks | None:
    """`may_age(fmt)` where a row's first blocks have half the bits of the others, or will; else None."""
    return fmt.core if isinstance(fmt.core, AgedBlocks) and fmt.core.ages else None


def compensates(fmt: Format) -> bool:
    """Whether errors of a token's channels make up for one another."""
    return isinstance(fmt.core, Compensated) and fmt.core.compensate
