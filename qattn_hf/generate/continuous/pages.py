"""Packed pages of one layer, shared by requests, and one row per request for its remaining state.

A page holds one block of tokens: the state tensors of the block, for all KV heads of the layer. Page numbers are the
same in every layer, so one block table of a request serves all layers. A row holds the state of a request as a whole:
its lengths, its ring of open tokens and its sink pool."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from qattn_hf.cache.report_rows import clamped_scales
from qattn_hf.generate.continuous.page_layout import by_block, by_row, bytes_of, resized, settled
from qattn_kernels.layer.arena import ALIGNMENT, Layout, places, views
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import layer_tensors
from qattn_kernels.layer.step import Arena, Step
from qattn_kernels.layer.support import reads_pages
from qattn_kernels.layout import State, TensorSpec, copy_blocks
from qattn_kernels.step.operator import attend_directly, attend_step
from qattn_kernels.step.states import crop

# row positions that are fixed for whole blocks without open tokens
LENGTHS = ("length", "open_start", "longest", "ring_from")
COUNTED = 1024  # pages whose scales are counted at once
RESERVED = 1  # pages that no request owns; unused entries of a batch's tables point to them


class Left(NamedTuple):
    """Blocks that leave their rows at the end of a call, because no later query of the sliding window sees them.

    Attributes:
        blocks: int32 `[R]`, blocks of each row.
        pages: int64 `[N]`, the pages of all these blocks.
    """

    blocks: torch.Tensor
    pages: torch.Tensor


@dataclass
class Steps:
    """Requests with one token each. One call of a layer serves them over the pages in place.

    The call covers the first R rows of a layer. Some of these rows may have no token. Such a row reads any column, has
    span 0, and writes to the extra column after the forward's last.

    Attributes:
        columns: int64 `[R, T]`, the forward's columns of each row's tokens; T is 1 in a step.
        targets: int64 `[R, T]`, the columns that receive the outputs.
        span: int32 `[R, 2]`, the operator's span: 0 and the number of the row's tokens.
        table: int32 `[R, NB]`, the page of each block; `RESERVED - 1` after a request's last block.
        left: blocks that leave the rows at the end of the call, or None.
        before: bytes of a layer's state before the call, if later layers repeat the call (`PagedLayer.read_again`).
    """

    columns: torch.Tensor
    targets: torch.Tensor
    span: torch.Tensor
    table: torch.Tensor
    left: Left | None
    before: dict[PagedLayer, torch.Tensor] = field(default_factory=dict, init=False)


@dataclass
class Rows(Steps):
    """Requests that one call of a layer serves over a temporary arena. Their pages are copied to the arena.

    Attributes:
        slots: int64 `[R]`, the requests' rows in the layer.
        written: int64 `[3, N]`: row, block and page of each block that the call may change.
        first: the first changed block of a single request, whose later blocks all change; else None.
        past: an upper bound of the closed blocks of any row.
        begins: for a single request without a row: tokens in the pages of its shared prefix.
    """

    slots: torch.Tensor
    written: torch.Tensor
    first: int | None
    past: int
    begins: int | None


class PagedLayer:
    """Pages and rows of one layer.

    Args:
        layout: layout of the layer; its numbers of rows and blocks are ignored.
        memory: uint8 zeros with room for `pages` pages of this layer.
        slots: largest number of requests held at once.
        constants: state tensors that no call writes, by name (`model_constants.constants`).
        blocks: largest number of blocks of a request; None means all.

    Attributes:
        name: identifies the memory layout; layers with equal names share launch plans.
        buffers: uint8, the bytes of all pages and of all rows.
        pages, rows: the state tensors as views of these bytes, by name. Tensors of pages have one row, whose blocks are
            the pages. Tensors of rows have `slots` rows.
        in_place: whether kernels read pages through a table, so that a step copies nothing.
        read_again: True if later layers attend to this layer's keys and values, as in Gemma 3n.
        local: the window of the layer's attention (`LayerSpec.local`); None without one.
    """

    read_again = False
    local: int | None = None

    def __init__(
        self,
        layout: Layout,
        memory: torch.Tensor,
        pages: int,
        slots: int,
        constants: State | None = None,
        blocks: int | None = None,
    ):
        self.layout, self.slots, self.constants = layout, slots, constants or {}
        self._paged, self._row = by_block(resized(layout, 1, pages)), by_row(resized(layout, slots, blocks or pages))
        # per-layer tensors that requests do not use: `columns_seen`, `padded`
        shared = {name: x for name, x in layer_tensors(*layout).items() if x.batch_dim is None}
        rows = torch.zeros(bytes_of(shared | self._row), dtype=torch.uint8, device=memory.device)
        found = _carved(shared | self._row, rows)
        self.pages, self.rows = _carved(self._paged, memory), {name: found[name] for name in self._row}
        self._shared = {name: found[name] for name in shared}
        for name, tensor in self.constants.items():
            self._shared[name].copy_(tensor)
        self.in_place = reads_pages(layout.spec, layout.geometry.heads)
        self._text = layout.encode()
        self.name = f"{pages} {slots} {blocks} {self._text}"
        self.buffers = memory, rows

    def state(self, count: int) -> State:
        """Return the state tensors of all pages and the first `count` rows."""
        return self.pages | {name: tensor[:count] for name, tensor in self.rows.items()} | self._shared

    @property
    def bytes_of_rows(self) -> int:
        """Bytes of all rows, without pages of the pool."""
        return sum(x.nbytes for x in self.rows.values())

    def clear_rows(self, slots: torch.Tensor) -> None:
        """Empty the rows `slots`, int64 `[N]`."""
        for name in {*LENGTHS, "closed", "dropped"} & self.rows.keys():
            self.rows[name].index_fill_(0, slots, 0)

    def clear_pages(self, pages: torch.Tensor) -> None:
        """Clear the masks of pages, int64 `[N]`. Masks of a sink pool are in the rows."""
        if "dropped" in self.pages:
            self.pages["dropped"].index_fill_(2, pages, 0)

    def clamped_scales(self) -> int:
        """Count the scales at the end of fp16's range in all pages, as their last requests left them."""
        found, count = 0, self.pages["block_len"].shape[1]
        for begin in range(0, count, COUNTED):
            size = min(COUNTED, count - begin)
            some = {name: x.narrow(self._paged[name].block_dim or 0, begin, size) for name, x in self.pages.items()}
            found += clamped_scales(self.layout.spec, some)
        return found

    def copy_row(self, source: int, target: int) -> None:
        """Copy a request's row to another row. Pages are not copied."""
        for tensor in self.rows.values():
            tensor[target].copy_(tensor[source])

    def keep_row(self, rows: Rows, target: int, drop: int) -> None:
        """Copy the row of one request to row `target`, without its last `drop` tokens."""
        arena, layout = self.gather(rows)
        state = views(arena, layout)
        if drop:
            crop(state, layout.spec, drop, arena, self._text)
        slots = torch.tensor([target], device=arena.device)
        self.clear_rows(slots)  # an earlier prefix may have had more blocks, whose masks would stay
        self._put_rows(state, slots)

    def _put_rows(self, state: State, slots: torch.Tensor) -> None:
        for name, tensor in self.rows.items():
            dim = self._row[name].block_dim
            if dim is None:
                tensor.index_copy_(0, slots, state[name])
            else:
                blocks = min(tensor.shape[dim], state[name].shape[dim])
                tensor.narrow(dim, 0, blocks).index_copy_(0, slots, state[name].narrow(dim, 0, blocks))

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy pages `source` to pages `target`, int64 `[N]` each."""
        for name, tensor in self._paged.items():
            block = tensor.block_dim
            assert block is not None
            self.pages[name].index_copy_(block, target, self.pages[name].index_select(block, source))

    def attend(
        self,
        rows: Steps,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
        again: bool = False,
    ) -> torch.Tensor:
        """Write the tokens of these requests into their pages and attend.

        Args:
            query: `[R, Hq, T, D]`.
            key: `[R, Hkv, T, D]`.
            value: `[R, Hkv, T, Dv]`.
            again: True to repeat an earlier call of the forward with the queries of another layer (`read_again`). The
                keys and values are the same, and so are the bytes of pages and rows.

        Returns:
            `[R, Hq, T, Dv]`.
        """
        if self.local is not None:
            scores = scores._replace(window=self.local)
        if not isinstance(rows, Rows):
            self._mark(rows, self.buffers[1], again)
            out, _ = attend_directly(Step(query, key, value, rows.span, Pages(self, rows.table), scores))
            self._let_leave(rows)
            return out
        arena, layout = self.gather(rows)
        self._mark(rows, arena, again)
        memory = Arena(arena, layout, self._text)
        out, _ = attend_step(Step(query, key, value, rows.span, memory, scores, rows.past))
        self.scatter(rows, views(arena, layout))
        return out

    def _let_leave(self, rows: Steps) -> None:
        """Do nothing: blocks in the pool stay until their request ends."""

    def _mark(self, rows: Steps, state: torch.Tensor, again: bool) -> None:
        """Keep the bytes before a call that later layers repeat, or restore them.

        Codes in pages need no copy. A call over pages in place only adds to them.
        """
        if again:
            state.copy_(rows.before[self])
        elif self.read_again:
            rows.before[self] = state.clone()

    def gather(self, rows: Rows) -> tuple[torch.Tensor, Layout]:
        """Copy these requests into an arena, as a separate cache's layer would have it. Return the arena and its
        layout."""
        count, blocks = rows.table.shape
        layout = resized(self.layout, count, blocks)
        arena = torch.zeros(places(layout)[1], dtype=torch.uint8, device=rows.table.device)
        state = views(arena, layout)
        for name, tensor in self.constants.items():
            state[name].copy_(tensor)
        if rows.begins == 0:
            return arena, layout
        if rows.begins is None:
            for name, tensor in self.rows.items():
                copy_blocks(tensor.index_select(0, rows.slots), self._row[name], state[name])
        else:
            for name in LENGTHS:
                state[name].fill_(rows.begins)
            state["closed"].fill_(rows.begins // self.layout.spec.window.block)
            for name, values in settled(self.layout).items():
                state[name].copy_(torch.tensor(values, device=state[name].device))
        for name, spec in self._paged.items():
            found = _pages_first(self.pages[name], spec)[rows.table.long()]
            _rows_first(state[name], spec).copy_(found)
        return arena, layout

    def scatter(self, rows: Rows, state: State) -> None:
        """Write the changes of a call on the arena of `gather`, with these `views`, back to pages and rows."""
        self._put_rows(state, rows.slots)
        row, block, page = rows.written
        for name, spec in self._paged.items():
            if rows.first is None:
                _pages_first(self.pages[name], spec)[page] = _rows_first(state[name], spec)[row, block]
            else:  # one launch instead of two
                assert spec.block_dim is not None
                changed = state[name].narrow(spec.block_dim, rows.first, len(page))
                self.pages[name].index_copy_(spec.block_dim, page, changed)


class Pages(NamedTuple):
    """Pages of a layer, and the first rows of its state, as `qattn_kernels.layer.step.Memory` of a call.

    Attributes:
        layer: the layer.
        table: int32 `[R, NB]`, the page of each block of a row.
    """

    layer: PagedLayer
    table: torch.Tensor

    @property
    def spec(self) -> LayerSpec:
        return self.layer.layout.spec

    @property
    def state(self) -> State:
        return self.layer.state(len(self.table))

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        return self.layer.buffers

    @property
    def plan_key(self) -> str:
        return self.layer.name


def _pages_first(pages: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return a view `[P, ...]` of a tensor of pages `[1, ..., P, ...]`."""
    assert spec.block_dim is not None
    return pages.squeeze(0).movedim(spec.block_dim - 1, 0)


def _rows_first(state: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return a view `[R, NB, ...]` of a state tensor `[R, ..., NB, ...]`."""
    assert spec.block_dim is not None
    return state.movedim(spec.block_dim, 1)


def _carved(tensors: dict[str, TensorSpec], memory: torch.Tensor) -> State:
    """Return consecutive, aligned views of `memory` for these tensors."""
    found, begin = {}, 0
    for name, tensor in tensors.items():
        found[name] = memory[begin : begin + tensor.nbytes()].view(tensor.dtype).view(tensor.shape)
        begin += math.ceil(tensor.nbytes() / ALIGNMENT) * ALIGNMENT
    return found
