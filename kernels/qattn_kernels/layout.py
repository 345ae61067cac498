"""Types that describe a layer's memory: sizes, the window of open tokens, and state tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

State = dict[str, torch.Tensor]

WIDEST_HEAD = 256  # channels; kernels take the products of wider heads in parts, with more warps


class Row(NamedTuple):
    """State of one sequence before a call, and its new tokens. Fields are scalars in kernels and `[B]` outside.

    Attributes:
        length: tokens of the row.
        closed: packed blocks.
        open_start: row position of the first open token, which no packed block has.
        closing: blocks that the call closes.
        first: first real column of the call's tokens.
        count: real tokens of the call that fit.
    """

    length: Any
    closed: Any
    open_start: Any
    closing: Any
    first: Any
    count: Any


class RowState(NamedTuple):
    """State tensors with the lengths of all rows. Fields have the tensors' names in the state.

    Attributes:
        length, closed, open_start: int32 `[B]`, as in `Row`.
        longest: int32 `[B]`, the most tokens that a row ever had.
        columns_seen: columns of all calls with padding, one number for all rows.
        padded: columns up to the last padding, one number for all rows.
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
    """State tensors of all rows' blocks that every format shares. Fields have the tensors' names in the state.

    Attributes:
        dropped: uint8 `[B, H, blocks, block / 8]`, one bit per token, set if the token is masked.
        nonfinite: int64 `[B, H]`, count of new tokens that were not finite.
        block_pos: int32 `[B, blocks]`, row position of the block's first token.
        block_len: int32 `[B, blocks]`, tokens in the block.
    """

    dropped: Any
    nonfinite: Any
    block_pos: Any
    block_len: Any


ROW_OVERFLOW = len(Row._fields)  # the next column: real tokens of the call that do not fit
ROW_FIELDS = 8  # kernels pass a `Row` on as int32 `[B, ROW_FIELDS]`; a power of two


@dataclass(frozen=True)
class Window:
    """Sizes of a row's blocks and of its ring of open tokens.

    Attributes:
        block: tokens of a packed block.
        span: tokens that stay open until their blocks are packed together; a multiple of `block`.
        residual: newest tokens that are never packed (KIVI's `R`).
        horizon: tokens that `crop` can undo bit for bit; the ring keeps this number of tokens after they are packed.
    """

    block: int = 64
    span: int = 64
    residual: int = 0
    horizon: int = 64

    @property
    def ring(self) -> int:
        """Slots of the ring, a multiple of a kernel's tile. A token's slot is its row position modulo this number."""
        return -(-(self.span + self.residual + self.horizon) // 64) * 64


@dataclass(frozen=True)
class SinkPool:
    """Attention sinks that stay in the ring's form instead of being packed (SinkQ): the tokens with the smallest keys.

    Attributes:
        num: sinks in the pool per row and head; 0 means no pool.
        window: evicted sinks that stay in the ring's form as well; older ones are read from their codes.
        select: which tokens become sinks: `smallest_key` or, for comparison, `largest_key`, `attention` (the tokens
            with most attention) or `random`.
        exclude: whether the statistics of a block leave out its sinks.
        prefill: `group` compares the pool with one block after the other. `whole`, as in the paper, compares it with
            all blocks of the first call, which evicts no sink.
    """

    num: int = 0
    window: int = 0
    select: str = "smallest_key"
    exclude: bool = True
    prefill: str = "group"

    def crop_blocks(self, window: Window) -> int:
        """Blocks that a crop can reopen. Sinks that these blocks evicted are kept, so that a crop can restore them."""
        return window.ring // window.block

    def entries(self, window: Window) -> int:
        """Entries of the sink table. Kernels need a power of two."""
        most = self.num * (1 + self.crop_blocks(window)) + self.window
        return max(32, 1 << (most - 1).bit_length()) if self.num else 0


@dataclass(frozen=True)
class Geometry:
    """Sizes of a layer.

    Attributes:
        batch: rows.
        heads: KV heads.
        k_dim, v_dim: head dims of keys and values.
        blocks: capacity.
        dtype: of the model.
    """

    batch: int
    heads: int
    k_dim: int
    v_dim: int
    blocks: int
    dtype: torch.dtype


@dataclass(frozen=True)
class TensorSpec:
    """Shape and role of one state tensor.

    Attributes:
        batch_dim: dimension of the rows; None if all rows share the tensor.
        block_dim: dimension that grows with the capacity, or None.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None = 0
    block_dim: int | None = None

    def nbytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def copy_blocks(tensor: torch.Tensor, spec: TensorSpec, new: torch.Tensor) -> None:
    """Copy the blocks that a state tensor and a larger or smaller one share; without a block dimension copy all."""
    if (dim := spec.block_dim) is not None:
        both = min(tensor.shape[dim], new.shape[dim])
        tensor, new = tensor.narrow(dim, 0, both), new.narrow(dim, 0, both)
    new.copy_(tensor)
