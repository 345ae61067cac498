"""A row's lengths, its mask bits and its sinks inside kernels: read before a call, written at its end."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_row(rows, b):
    """A row as it was before the call, and what the call brings: six columns of `Panel.rows`."""
    r = rows + b * 8
    return tl.load(r), tl.load(r + 1), tl.load(r + 2), tl.load(r + 3), tl.load(r + 4), tl.load(r + 5)


@triton.jit
def packed_since(j, open_start, C: tl.constexpr):
    """First query position that reads block `j` of the open span from its codes: as in single steps."""
    end = open_start + (j + 1) * C.BLOCK
    step = open_start + (j * C.BLOCK // C.SPAN + 1) * C.SPAN - 1 + C.RESIDUAL
    return tl.maximum(end, step)


@triton.jit
def slot_bits(dropped, slot):
    """Whether the score of a slot is masked; `dropped` points to the first byte of a head."""
    return (tl.load(dropped + slot // 8).to(tl.int32) >> (slot % 8)) & 1


@triton.jit
def commit_row(ROWS, STATE, row, b, B, columns, BP: tl.constexpr, C: tl.constexpr):
    """The row's new lengths, once nobody reads the old ones: kernels after the append read `ROWS`."""
    length, closed, open_start, closing, first, count = row
    tl.store(STATE[0] + b, length + count)
    tl.store(STATE[1] + b, closed + closing)
    tl.store(STATE[2] + b, open_start + closing * C.BLOCK)
    tl.store(STATE[3] + b, tl.maximum(tl.load(STATE[3] + b), length + count))
    lost = tl.load(ROWS + b * 8 + 6)
    if lost > 0:
        tl.store(STATE[6] + b, tl.load(STATE[6] + b) + lost)
    if b == 0:
        seen, n = tl.load(STATE[4]), tl.arange(0, BP)
        tl.store(STATE[4], seen + columns)
        starts = tl.load(ROWS + n * 8 + 4, mask=n < B, other=0)
        counts = tl.load(ROWS + n * 8 + 5, mask=n < B, other=columns)
        padding = tl.max(tl.where(starts + counts < columns, columns, starts), 0)  # to the end of the last one
        if padding > 0:
            tl.store(STATE[5], seen + padding)


@triton.jit
def flip_bits(flags, slot, where):
    """Flip bits of `dropped`; entries may share a word."""
    words = flags.to(tl.pointer_type(tl.int32)) + slot // 32
    tl.atomic_xor(words, tl.full(slot.shape, 1, tl.int32) << (slot % 32), mask=where)


@triton.jit
def settle_sinks(TABLE, DROPPED, row, bh, NB, C: tl.constexpr):
    """End of a call: bits of `dropped` follow the table of sinks, once nobody reads the old ones."""
    if row[3] > 0:
        e = bh.to(tl.int64) * C.ENTRIES + tl.arange(0, C.ENTRIES)
        changed = (tl.load(TABLE.born + e) > row[1]) ^ (tl.load(TABLE.written + e) > row[1])
        flags = DROPPED + bh.to(tl.int64) * NB * (C.BLOCK // 8)
        flip_bits(flags, tl.load(TABLE.slot + e), changed)
