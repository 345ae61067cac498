"""Reorder the rows of a whole arena in one launch. `reference.py` is the specification."""

from __future__ import annotations

import triton
import triton.language as tl

WORD = 8  # bytes that a thread moves at once, if they divide the row's bytes
CHUNK = 8192  # bytes of each row that one program moves


@triton.jit
def _move(ARENA, ROWS, begin, stride, count, B, UNITS: tl.constexpr, MOST: tl.constexpr):
    """Move `count` units of each row, from `begin` on, `UNITS` units at a time; rows are `stride` units apart."""
    row, d = tl.arange(0, MOST), tl.arange(0, UNITS)
    source = tl.load(ROWS + row, mask=row < B, other=0)
    moves = ((row < B) & (source != row) & (source >= 0) & (source < B))[:, None]
    for at in range(0, count, UNITS):
        inside = moves & (at + d < count)[None, :]
        here = ARENA + begin + at + d[None, :]
        x = tl.load(here + source.to(tl.int64)[:, None] * stride, mask=inside, other=0)
        tl.debug_barrier()  # read every row before writing one
        tl.store(here + row.to(tl.int64)[:, None] * stride, x, mask=inside)


@triton.jit(do_not_specialize=["B"])
def reorder_kernel(ARENA, ROWS, CHUNKS, B, MOST: tl.constexpr, UNITS: tl.constexpr, WORD: tl.constexpr):
    """Move one chunk of every row. One program per chunk.

    `CHUNKS` `[n, 3]`: the byte where a chunk begins in the arena's first row, the bytes from one row to the next, and
    the bytes of the chunk. `B`: number of rows, at most `MOST`. Row i becomes the old row `ROWS[i]`."""
    chunk = CHUNKS + 3 * tl.program_id(0).to(tl.int64)
    begin, stride, count = tl.load(chunk), tl.load(chunk + 1), tl.load(chunk + 2)
    if stride % WORD == 0:
        words = ARENA.to(tl.pointer_type(tl.int64))
        _move(words, ROWS, begin // WORD, stride // WORD, count // WORD, B, UNITS, MOST)
    else:
        _move(ARENA, ROWS, begin, stride, count, B, UNITS, MOST)
