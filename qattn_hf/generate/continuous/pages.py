"""The packed pages of one layer, which requests share, and the rows that hold what a request has of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from qattn_kernels.formats.traits import MixedHeads
from qattn_kernels.layer.arena import ALIGNMENT, Layout, places, views
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.state import layer_tensors, row_tensors
from qattn_kernels.layout import State, TensorSpec, copy_blocks
from qattn_kernels.step.operator import attend
from qattn_kernels.step.paged import Pages, attend_pages, reads_pages
from qattn_kernels.step.states import crop

LENGTHS = ("length", "open_start", "longest", "ring_from")  # row positions where whole blocks end and nothing is open
RESERVED = 1  # pages that are no request's: short rows of a batch point there


def by_block(layout: Layout) -> dict[str, TensorSpec]:
    """The state tensors with a dimension of blocks that a page holds: not the masks of a sink pool (`by_row`)."""
    own = {"dropped"} if layout.spec.sink_pool.num else set()
    return {name: x for name, x in layer_tensors(*layout).items() if x.block_dim is not None and name not in own}


def by_row(layout: Layout) -> dict[str, TensorSpec]:
    """The state tensors of a row without its pages: lengths, the ring of open tokens, the sink pool. With it the masks
    of all blocks, which change when a sink leaves it, so that requests with other sinks could not share them."""
    own = layer_tensors(*layout).keys() - by_block(layout).keys()
    return {name: x for name, x in layer_tensors(*layout).items() if name in own and x.batch_dim is not None}


def shares_pages(layout: Layout) -> bool:
    """Whether the pages of whole blocks are all that is kept of their tokens, so that another request may begin with
    them: no tokens stay open behind a block, and no row has a mean, a scale or sinks of its own."""
    window = layout.spec.window
    return window.span == window.block and window.residual == 0 and not layout.spec.sink_pool.num and not _own(layout)


def keeps_rows(layout: Layout) -> bool:
    """Whether a row that was cropped to whole blocks is as if it had read no more, so that another request may begin
    with it and its pages: no mean, scale or rank is of later tokens, and sinks are chosen block by block."""
    pool = layout.spec.sink_pool
    by_block = pool.prefill == "group" and pool.select != "attention"
    return by_block and layout.spec.window.span == layout.spec.window.block and not _own(layout)


def _own(layout: Layout) -> set[str]:
    """State tensors of a row, without the lengths that every row has: open tokens and sinks."""
    rows = by_row(layout)
    tokens = {name for name in rows if ".ring" in name or "sink" in name}
    return rows.keys() - row_tensors(*layout).keys() - tokens - settled(layout).keys()


def settled(layout: Layout) -> dict[str, list[int]]:
    """State tensors of a row, `[Hkv]` by name, that are the same for all rows with a closed block."""
    spec, heads = layout.spec, layout.geometry.heads
    sides = ((side, fmt) for side, fmt in (("k", spec.k), ("v", spec.v)) if isinstance(fmt, MixedHeads))
    return {f"{side}.{name}": values for side, fmt in sides for name, values in fmt.settled(heads).items()}


def resized(layout: Layout, batch: int, blocks: int) -> Layout:
    """The layout of so many rows and blocks."""
    return layout._replace(geometry=replace(layout.geometry, batch=batch, blocks=blocks))


def bytes_of(tensors: dict[str, TensorSpec]) -> int:
    """Bytes of these tensors one behind the other, each on a boundary of `ALIGNMENT`."""
    return sum(-(-x.nbytes() // ALIGNMENT) * ALIGNMENT for x in tensors.values())


def page_bytes(layout: Layout) -> int:
    """Bytes of one block of tokens of a layer, all KV heads, rounded up to `ALIGNMENT`."""
    exact = sum(x.nbytes() for x in by_block(resized(layout, 1, 1)).values())
    return -(-exact // ALIGNMENT) * ALIGNMENT


def row_bytes(layout: Layout, blocks: int = 1) -> int:
    """Bytes that a request of at most so many blocks takes in a layer in addition to its pages."""
    return bytes_of(by_row(resized(layout, 1, blocks)))


def mean_page_bytes(layouts: Sequence[Layout]) -> int:
    """Bytes of a page, for layers of different sizes their mean, rounded up to `ALIGNMENT`; at least what the
    boundaries between a layer's tensors take."""
    mean = math.ceil(sum(map(page_bytes, layouts)) / len(layouts))
    boundaries = max(len(by_block(layout)) for layout in layouts) * ALIGNMENT
    return max(-(-mean // ALIGNMENT) * ALIGNMENT, boundaries)


@dataclass
class Steps:
    """Requests of a forward with one token each, which one call of a layer serves over the pages where they lie.

    The call has the first R rows of a layer. Among these may be rows without a token: they read any column, their span
    is 0, and their target is the column behind the forward's last.

    Attributes:
        columns: int64 `[R, T]`, columns of the forward that hold each row's tokens; of a step, T is 1.
        targets: int64 `[R, T]`, columns that take what is found for them.
        span: int32 `[R, 2]`, as the operator takes it: 0 and the row's tokens.
        table: int32 `[R, NB]`, page of each block; `RESERVED - 1` behind a request's last.
    """

    columns: torch.Tensor
    targets: torch.Tensor
    span: torch.Tensor
    table: torch.Tensor


@dataclass
class Rows(Steps):
    """Requests that one call of a layer serves over an arena of their own, into which their pages are copied.

    Attributes:
        slots: int64 `[R]`, their rows of the layer.
        written: int64 `[3, N]`: row, block and page of those that the call may change. first: the first such block of
            one request, whose others follow; else None.
        past: an upper bound of the blocks that any row has closed.
        begins: for one request that has no row yet: tokens of the pages of its shared prefix.
    """

    slots: torch.Tensor
    written: torch.Tensor
    first: int | None
    past: int
    begins: int | None


class PagedLayer:
    """Pages and rows of one layer.

    Args:
        layout: of the layer; its rows and blocks are of no account.
        memory: uint8, room for `pages` pages of this layer, zeros. slots: requests that may be held at once.
        constants: state tensors that no call writes, by name (`model_constants.constants`). blocks: of a request, at
            most; None is all.

    Attributes:
        name: says what lies where in its memory; layers with one name share launch plans.
    """

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
        # what no row has of its own, and nobody asks of requests: `columns_seen`, `padded`
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
        self._memory = Pages(memory, rows, self.state, layout.spec, self.name)

    def state(self, count: int) -> State:
        """The state tensors of all pages and of the first so many rows."""
        return self.pages | {name: tensor[:count] for name, tensor in self.rows.items()} | self._shared

    def clear_rows(self, slots: torch.Tensor) -> None:
        """Let rows, int64 `[N]`, hold no tokens."""
        for name in {*LENGTHS, "closed", "dropped"} & self.rows.keys():
            self.rows[name].index_fill_(0, slots, 0)

    def clear_pages(self, pages: torch.Tensor) -> None:
        """Let no token of pages, int64 `[N]`, be masked; masks of a sink pool are in the rows."""
        if "dropped" in self.pages:
            self.pages["dropped"].index_fill_(2, pages, 0)

    def copy_row(self, source: int, target: int) -> None:
        """Copy what a request has in addition to its pages."""
        for tensor in self.rows.values():
            tensor[target].copy_(tensor[source])

    def keep_row(self, rows: Rows, target: int, drop: int) -> None:
        """Copy the row of one request to another, without its last `drop` tokens."""
        arena, layout = self.gather(rows)
        state = views(arena, layout)
        if drop:
            crop(state, layout.spec, drop, arena, self._text)
        self._put_rows(state, torch.tensor([target], device=arena.device))

    def _put_rows(self, state: State, slots: torch.Tensor) -> None:
        for name, tensor in self.rows.items():
            dim = self._row[name].block_dim
            if dim is None:
                tensor.index_copy_(0, slots, state[name])
            else:
                blocks = min(tensor.shape[dim], state[name].shape[dim])
                tensor.narrow(dim, 0, blocks).index_copy_(0, slots, state[name].narrow(dim, 0, blocks))

    def copy_pages(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy pages, int64 `[N]` each."""
        for name, tensor in self._paged.items():
            block = tensor.block_dim
            assert block is not None
            self.pages[name].index_copy_(block, target, self.pages[name].index_select(block, source))

    def attend(
        self, rows: Steps, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """Write the tokens of these requests into their pages and attend.

        Args:
            query: `[R, Hq, T, D]`. key, value: `[R, Hkv, T, D]`.

        Returns:
            `[R, Hq, T, Dv]`.
        """
        if not isinstance(rows, Rows):
            return attend_pages(query, key, value, rows.span, rows.table, self._memory, scores)
        arena, layout = self.gather(rows)
        sizes = scores.scale, scores.softcap, scores.window, scores.sinks
        where = arena, self._text, layout.geometry.blocks
        out, _ = attend(query, key, value, rows.span, *where, *sizes, rows.past)
        self.scatter(rows, arena, layout)
        return out

    def gather(self, rows: Rows) -> tuple[torch.Tensor, Layout]:
        """The arena of these requests alone, as a layer of a cache of their own would have it, and its layout."""
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

    def scatter(self, rows: Rows, arena: torch.Tensor, layout: Layout) -> None:
        """Write back what a call on the arena of `gather` changed."""
        state = views(arena, layout)
        self._put_rows(state, rows.slots)
        row, block, page = rows.written
        for name, spec in self._paged.items():
            if rows.first is None:
                _pages_first(self.pages[name], spec)[page] = _rows_first(state[name], spec)[row, block]
            else:  # the same in one launch
                assert spec.block_dim is not None
                changed = state[name].narrow(spec.block_dim, rows.first, len(page))
                self.pages[name].index_copy_(spec.block_dim, page, changed)


def _pages_first(pages: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """View `[P, ...]` of a tensor of pages `[1, ..., P, ...]`."""
    assert spec.block_dim is not None
    return pages.squeeze(0).movedim(spec.block_dim - 1, 0)


def _rows_first(state: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """View `[R, NB, ...]` of a state tensor `[R, ..., NB, ...]`."""
    assert spec.block_dim is not None
    return state.movedim(spec.block_dim, 1)


def _carved(tensors: dict[str, TensorSpec], memory: torch.Tensor) -> State:
    """These tensors as views of `memory`, one behind the other."""
    found, begin = {}, 0
    for name, tensor in tensors.items():
        found[name] = memory[begin : begin + tensor.nbytes()].view(tensor.dtype).view(tensor.shape)
        begin += math.ceil(tensor.nbytes() / ALIGNMENT) * ALIGNMENT
    return found
