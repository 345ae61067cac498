"""Words for the memory of a layer: its sizes, its window of open tokens, and what a state tensor is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

State = dict[str, torch.Tensor]


class Row(NamedTuple):
    """A row as it was before a call, and what the call brings it. Scalars inside kernels, `[B]` outside.

    Attributes:
        length: tokens of the row.
        closed: packed blocks.
        open_start: row position of the first token that is in no packed block.
        closing: blocks that the call closes.
        first: first real column of the call's tokens.
        count: real tokens of the call, of those that fit.
    """

    length: Any
    closed: Any
    open_start: Any
    closing: Any
    first: Any
    count: Any


class RowState(NamedTuple):
    """The state tensors of all rows' lengths, by their names in the state; those without a row are one for all.

    Attributes:
        length, closed, open_start: int32 `[B]`, as in `Row`.
        longest: int32 `[B]`, the most tokens that a row ever had.
        columns_seen: columns of all calls, padding included.
        padded: columns up to the last padding.
        overflow: `[B]`, tokens that did not fit.
    """

    length: Any
    closed: Any
    open_start: Any
    longest: Any
    columns_seen: Any
    padded: Any
    overflow: Any


class BlockState(NamedTuple):
    """The state tensors of all rows' blocks that no format owns, by their names in the state.

    Attributes:
        dropped: uint8 `[B, H, blocks, block / 8]`, a bit for each masked token.
        nonfinite: int64 `[B, H]`, new tokens that were not finite.
        block_pos, block_len: int32 `[B, blocks]`, row position of a block's first token, and how many it has.
    """

    dropped: Any
    nonfinite: Any
    block_pos: Any
    block_len: Any


ROW_OVERFLOW = len(Row._fields)  # the column behind: real tokens of the call that do not fit
ROW_FIELDS = 8  # columns of the int32 tensor `[B, ROW_FIELDS]` that kernels hand a `Row` on in, a power of two


@dataclass(frozen=True)
class Window:
    """What surrounds the packed blocks of a row.

    Attributes:
        block: tokens of a packed block.
        span: tokens that stand open before their blocks close together; a multiple of `block`.
        residual: newest tokens that are never packed (KIVI's `R`).
        horizon: tokens that `crop` can take back bit for bit; the ring holds that many more than are open.
    """

    block: int = 64
    span: int = 64
    residual: int = 0
    horizon: int = 64

    @property
    def ring(self) -> int:
        """Slots of the ring of open tokens; a token's slot is its row position modulo this. Whole tiles of a kernel."""
        return -(-(self.span + self.residual + self.horizon) // 64) * 64


@dataclass(frozen=True)
class SinkPool:
    """Attention sinks that leave the packed blocks (SinkQ): the tokens of the smallest keys stay in open form.

    Attributes:
        num: sinks of a row and head that are in the pool; 0 is no pool.
        window: evicted sinks that stay in open form too, before the oldest is read from its codes.
        select: which tokens are sinks: `smallest_key`, or for comparison `largest_key`, `attention` (those that got
            most of it), `random`.
        exclude: whether a sink leaves the statistics of its block too.
        prefill: `group`: the pool competes with each block in order; `whole`, the paper's: with all that the first
            call packs, and nothing is evicted there.
    """

    num: int = 0
    window: int = 0
    select: str = "smallest_key"
    exclude: bool = True
    prefill: str = "group"

    def crop_blocks(self, window: Window) -> int:
        """Blocks that a crop can reopen: what left the pool in these is kept, so that it comes back."""
        return window.ring // window.block

    def entries(self, window: Window) -> int:
        """Places of the table that hold them all: a power of two, as kernels want it."""
        most = self.num * (1 + self.crop_blocks(window)) + self.window
        return max(32, 1 << (most - 1).bit_length()) if self.num else 0


@dataclass(frozen=True)
class Geometry:
    """Sizes of a layer: batch rows, KV heads, head dims of K and of V, blocks of capacity, and the model's dtype."""

    batch: int
    heads: int
    k_dim: int
    v_dim: int
    blocks: int
    dtype: torch.dtype


@dataclass(frozen=True)
class TensorSpec:
    """Shape and role of one state tensor: `batch_dim` is None for what all rows share, `block_dim` grows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None = 0
    block_dim: int | None = None

    def nbytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def copy_blocks(tensor: torch.Tensor, spec: TensorSpec, new: torch.Tensor) -> None:
    """Copy a state tensor to one with more or fewer blocks, as many as both have; without blocks, all of it."""
    if (dim := spec.block_dim) is not None:
        both = min(tensor.shape[dim], new.shape[dim])
        tensor, new = tensor.narrow(dim, 0, both), new.narrow(dim, 0, both)
    new.copy_(tensor)
