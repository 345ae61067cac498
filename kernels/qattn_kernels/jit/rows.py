"""A row's lengths, mask bits and sinks in kernels: read before a call, written at its end."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels import layout
from qattn_kernels.layout import BlockState, Row, RowState

ROW_FIELDS, OVERFLOW = tl.constexpr(layout.ROW_FIELDS), tl.constexpr(layout.ROW_OVERFLOW)
FOREVER = tl.constexpr(2147483647)  # a row position that no query reaches
COMMITTED = tl.constexpr(32)  # rows per iteration of `commit_rows`


@triton.jit
def in_window(pos, q_pos, window, CHUNKS: tl.constexpr):
    """Return whether tokens at row positions `pos` are in the window of queries at `q_pos`.

    The window is `window` tokens, or with `CHUNKS` the query's chunk of `window` tokens."""
    if CHUNKS:
        return pos >= q_pos - q_pos % window
    else:
        return pos > q_pos - window


@triton.jit
def load_row(rows, b, there=None):
    """Load the `Row` of row `b` from `rows`, int32 `[B, ROW_FIELDS]`, which `store_row` wrote.

    For several rows `b`, fields have a number for each. Fields of a row where `there` is false are undefined."""
    at = rows + b * ROW_FIELDS
    return Row(
        tl.load(at, mask=there),
        tl.load(at + 1, mask=there),
        tl.load(at + 2, mask=there),
        tl.load(at + 3, mask=there),
        tl.load(at + 4, mask=there),
        tl.load(at + 5, mask=there),
    )


@triton.jit
def queries_end(row, T, C: tl.constexpr):
    """Return the end of a row's queries in a short call, counted in columns from the row's first token.

    Queries are the row's tokens, then the padding after them, which sees all tokens. Columns before the first token are
    not queries. In a one-token step, a row without a token has no query."""
    return row.count if C.ONE_TOKEN else T - row.first


@triton.jit
def result_column(t, row, T):
    """Return the column of query `t` of a row. Queries beyond `queries_end` map to the columns before the first
    token."""
    to = row.first + t
    return tl.where(to < T, to, to - T)


@triton.jit
def block_at(PAGES, b, index, NB, C: tl.constexpr):
    """Return the location of a row's blocks `index` among the blocks of a head; in a page pool, their pages.

    `PAGES`: page table `[B, NB]`, number of pages, and blocks per row with mask bits. `NB`: capacity of a row."""
    if C.PAGED:
        return tl.load(PAGES[0] + b * NB + tl.minimum(index, NB - 1))
    else:
        return index


@triton.jit
def block_of(slot, C: tl.constexpr):
    """Return the index of the block of a `formats.contract.Slot` among the blocks of all heads."""
    return (slot.b * C.H + slot.h).to(tl.int64) * slot.capacity + slot.index


@triton.jit
def locate(S, b, h, LOCATE: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Call `LOCATE`, a `formats.contract.JitFormat.locate`; without one, heads are stored in order."""
    if LOCATE is None:
        return h, (b * C.H + h).to(tl.int64), h < 0
    else:
        return LOCATE(S, b, h, SIDE, C)


@triton.jit
def first_block(PAGES, b, h, NB, C: tl.constexpr):
    """Return the index of a head's first block among the blocks of all heads, in the row's arena or in the page
    pool."""
    if C.PAGED:
        return h.to(tl.int64) * PAGES[1]
    else:
        return (b * C.H + h).to(tl.int64) * NB


@triton.jit
def first_bits(DROPPED, PAGES, b, h, NB, C: tl.constexpr):
    """Return the pointer to the mask bits of a head's first block.

    With a sink pool every row has separate mask bits, also over a page pool, where a row has room for `PAGES[2]`
    blocks. Without a sink pool, mask bits are in the pages."""
    if C.PAGED and C.ENTRIES > 0:
        return DROPPED + (b * C.H + h).to(tl.int64) * PAGES[2] * (C.BLOCK // 8)
    else:
        return DROPPED + first_block(PAGES, b, h, NB, C) * (C.BLOCK // 8)


@triton.jit
def bits_at(at, block, C: tl.constexpr):
    """Return the index, after `first_bits`, of the mask bits of a row's block number `block` at location `at`."""
    if C.PAGED and C.ENTRIES > 0:
        return block
    else:
        return at


@triton.jit
def store_row(rows, b, row):
    """Store a `Row` in `rows` for kernels after the append. The column `OVERFLOW` stays unchanged."""
    at = rows + b * ROW_FIELDS
    for i in tl.static_range(OVERFLOW):
        tl.store(at + i, row[i])


@triton.jit
def packed_since(j, open_start, C: tl.constexpr):
    """Return the first query position that reads block `j` of the open span from its codes. Earlier queries of the call
    read its tokens from the ring, as they would in single steps."""
    end = open_start + (j + 1) * C.BLOCK
    step = open_start + (j * C.BLOCK // C.SPAN + 1) * C.SPAN - 1 + C.RESIDUAL
    return tl.maximum(end, step)


@triton.jit
def slot_bits(dropped, slot):
    """Return int32 1 where a slot's mask bit is set, else 0. `dropped` points to the byte of slot 0."""
    return (tl.load(dropped + slot // 8).to(tl.int32) >> (slot % 8)) & 1


@triton.jit
def commit_rows(ROWS, LAYER, B, columns, C: tl.constexpr):
    """Store the lengths of all `B` rows after a call in the state. Kernels that run at the same time read `ROWS`
    instead.

    Also stores the counts that rows share: the columns seen, and where padding ended. `columns`: columns of the
    call."""
    state, padding = RowState(*LAYER.rows), 0
    columns_seen = tl.load(state.columns_seen)
    for begin in range(0, B, COMMITTED):
        b = begin + tl.arange(0, COMMITTED)
        there = b < B
        row = load_row(ROWS, b, there)
        overflow = tl.load(ROWS + b * ROW_FIELDS + OVERFLOW, mask=there, other=0)
        longest = tl.load(state.longest + b, mask=there, other=0)
        overflowed = tl.load(state.overflow + b, mask=there, other=0)
        length = row.length + row.count
        tl.store(state.length + b, length, mask=there)
        tl.store(state.closed + b, row.closed + row.closing, mask=there)
        tl.store(state.open_start + b, row.open_start + row.closing * C.BLOCK, mask=there)
        tl.store(state.longest + b, tl.maximum(longest, length), mask=there)
        tl.store(state.overflow + b, overflowed + tl.maximum(overflow, 0), mask=there)
        # columns up to the end of the row's padding
        padded = tl.where(row.first + row.count < columns, columns, row.first)
        padding = tl.maximum(padding, tl.max(tl.where(there, padded, 0), 0))
    tl.store(state.columns_seen, columns_seen + columns)
    if padding > 0:
        tl.store(state.padded, columns_seen + padding)


@triton.jit
def flip_bits(flags, slot, where):
    """Flip the mask bits of the slots `slot`, where `where` is true. Atomic, because slots may share a word. `flags`
    points to the byte of slot 0."""
    words = flags.to(tl.pointer_type(tl.int32)) + slot // 32
    tl.atomic_xor(words, tl.full(slot.shape, 1, tl.int32) << (slot % 32), mask=where)


@triton.jit
def settle_sinks(LAYER, row, b, h, NB, C: tl.constexpr):
    """Flip the mask bits of the tokens that this call moved into the sink pool or back to their blocks.

    Runs at the end of a call, when every program has read the old bits. A token in the pool is masked in its block."""
    if row.closing > 0:
        e = (b * C.H + h).to(tl.int64) * C.ENTRIES + tl.arange(0, C.ENTRIES)
        table = LAYER.sinks.table
        changed = (tl.load(table.born + e) > row.closed) ^ (tl.load(table.written + e) > row.closed)
        slot = tl.load(table.slot + e)
        flip_bits(first_bits(BlockState(*LAYER.blocks).dropped, LAYER.pages, b, h, NB, C), slot, changed)
