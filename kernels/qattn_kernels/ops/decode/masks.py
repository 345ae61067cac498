"""Mask the scores that a query may not see in a decode tile, for the ring and for packed blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.jit.math import NOTHING
from qattn_kernels.jit.rows import (
    FOREVER,
    bits_at,
    block_at,
    in_window,
    packed_since,
    slot_bits,
)
from qattn_kernels.jit.tile_order import token_order
from qattn_kernels.ops.decode.weights import count_visible
from qattn_kernels.ops.sink_pool.kernel import moved_tokens, visible_from


@triton.jit
def mask_ring(s, ring_slot, program, C: tl.constexpr):
    """Mask scores `s` `[slots, Q]` of ring slots `ring_slot` that a query may not see, or reads from a packed block
    instead: a block that this call closes is in both places."""
    row, q_pos = program.row, program.q_pos
    last = row.length + row.count - 1
    pos = last - (last - ring_slot + C.RING) % C.RING
    inside = pos >= row.open_start
    offset = tl.where(inside, pos - row.open_start, 0)
    block = offset // C.BLOCK
    if C.PAGED:
        at = block_at(program.pages, program.b, row.closed + block, program.capacity, C)
        slot = bits_at(at, row.closed + block, C) * C.BLOCK + offset % C.BLOCK
    else:
        slot = row.closed * C.BLOCK + offset
    keep = inside & (slot_bits(program.dropped, slot) == 0)
    until = tl.where(block < row.closing, packed_since(block, row.open_start, C), FOREVER)
    see = keep[:, None] & (pos[:, None] <= q_pos[None, :]) & (q_pos[None, :] < until[:, None])
    if C.LOCAL:
        see = see & in_window(pos[:, None], q_pos[None, :], program.scoring.window, C.CHUNKS)
    return tl.where(see, s, NOTHING)


@triton.jit
def masked_words(words, block, C: tl.constexpr):
    """Return the mask bits of a block as four int32 scalars, for any block size."""
    WORDS: tl.constexpr = C.BLOCK // 32
    at = words + block * WORDS
    first, second = tl.load(at), tl.load(at + min(1, WORDS - 1))
    if WORDS > 2:
        return first, second, tl.load(at + 2), tl.load(at + 3)
    else:
        return first, second, first, second


@triton.jit
def mask_packed(s, block, at, masked, tokens, program, blocks, C: tl.constexpr):
    """Mask scores `s` `[BLOCK, Q]` that a query may not see, in a row's block number `block`, at index `at` of the
    arena or pool, with `tokens` tokens and the mask bits `masked` (`masked_words`).

    Works from scalars only. A vector load would pass through shared memory once for each layout that the compiler uses
    for scores."""
    row, q_pos = program.row, program.q_pos
    t = token_order(C.BLOCK, C.PARTS)
    low, high = tl.where(t < 32, masked[0], masked[1]), tl.where(t < 96, masked[2], masked[3])
    keep = (tl.where(t < 64, low, high) >> (t % 32)) & 1 == 0
    late = block >= row.closed
    if C.RING > 0:  # a block closed by this call is visible to the queries that would see it in single steps
        start = tl.load(blocks.pos + at)
        keep = keep & (t < tokens)
        see = (~late) | (q_pos >= packed_since(block - row.closed, row.open_start, C))
        if C.ENTRIES > 0:
            moved = t < 0
            if row.closing > 0:
                moved = moved_tokens(blocks.moved, block, t, program.bh, C)
            see = (keep[:, None] ^ (moved[:, None] & (q_pos >= visible_from(row, C))[None, :])) & see[None, :]
        else:
            see = keep[:, None] & see[None, :]
    else:  # tokens are packed as they arrive
        start = tl.where(late, row.open_start + (block - row.closed) * C.BLOCK, tl.load(blocks.pos + at))
        keep = keep & (late | (t < tokens))
        q_end = tl.minimum(q_pos, row.length + row.count - 1)  # padding after the row's tokens sees them all
        see = keep[:, None] & ((~late) | ((start + t)[:, None] <= q_end[None, :]))
    if C.LOCAL:
        see = see & in_window((start + t)[:, None], q_pos[None, :], program.scoring.window, C.CHUNKS)
    return tl.where(see, s, NOTHING)


@triton.jit
def mask_block(s, program, blocks, block, at, C: tl.constexpr):
    """Return the masked scores of the packed block at index `at`, and the number of tokens that each query sees.

    Only sparse V uses the count."""
    words = program.dropped.to(tl.pointer_type(tl.int32))
    masked = masked_words(words, bits_at(at, tl.minimum(block, program.capacity - 1), C), C)
    tokens = tl.load(blocks.length + at)
    count = tl.full(program.q_pos.shape, C.BLOCK, tl.int32)
    some = (masked[0] | masked[1] | masked[2] | masked[3]) != 0
    if some | (tokens != C.BLOCK) | (block >= program.row.closed) | C.LOCAL:
        s = mask_packed(s, block, at, masked, tokens, program, blocks, C)
        if C.SPARSE_V:
            count = count_visible(s)
    return s, count
