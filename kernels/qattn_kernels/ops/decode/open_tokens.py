"""The parts of the context that a decode reads in open form: the ring, and the sinks that are kept out of the blocks.

They are short, so that a program would wait for memory longer than it computes. So a loop over INT8 tiles has no branch
and a second stage: all that a turn reads comes at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.contract import RingTile
from qattn_kernels.jit.math import NOTHING
from qattn_kernels.jit.rows import in_window
from qattn_kernels.jit.tile_order import to_token_order, token_order
from qattn_kernels.launch import constants
from qattn_kernels.ops.decode.masks import mask_ring
from qattn_kernels.ops.decode.parts import Skips, Sums
from qattn_kernels.ops.decode.weights import count_visible, soft_cap, weigh
from qattn_kernels.ops.sink_pool.kernel import sinks_visible, visible_from

RING_TILE = tl.constexpr(constants.RING_TILE)
SINK_TILE = tl.constexpr(constants.SINK_TILE)


class SinkPool(NamedTuple):
    """The sink pool as a decode reads it.

    Attributes:
        k, v: keys and values of all heads' sinks.
        table: the `launch.call.Table` of all heads.
        end: of the head's used entries.
    """

    k: Any
    v: Any
    table: Any
    end: Any


@triton.jit
def ring_tile_used(row, start, C: tl.constexpr):
    """Whether a tile of slots from `start` on may hold a token that was open before the call, or a new one."""
    behind = (start - row.open_start % C.RING + C.RING) % C.RING  # slots from the first open token to this tile
    return (behind < row.length + row.count - row.open_start) | (behind > C.RING - RING_TILE)


@triton.jit
def split_used(split, row, C: tl.constexpr):
    """Whether a split may hold a token, as far as the ring tells, which has parts: of these those do that have one."""
    return (split >= C.RING_PARTS) | ring_tile_used(row, split * RING_TILE, C)


@triton.jit
def _add(s, V, tile, program, sums, skips, codec, C: tl.constexpr):
    """A `RingTile` with its masked scores into the sums."""
    SIDE: tl.constexpr = C.V
    w, alpha, beta, m = weigh(s, sums.m, program.scoring.sas_threshold, C)
    acc, total = codec.ring_values(V, tile, w, sums.acc, alpha, beta, SIDE, C)
    if C.SPARSE_V:
        skips = Skips(skips.lost, skips.read + count_visible(s), skips.skipped)
    return Sums(m, sums.l * alpha + total * beta, acc), skips


@triton.jit
def _ring_tile(K, V, program, start, there, sums, skips, codec, C: tl.constexpr):
    """Attention over the slots of the ring from `start` on: tokens that were open before the call and its own. `there`:
    whether this is a tile at all."""
    SIDE: tl.constexpr = C.K
    first = program.bh.to(tl.int64) * C.RING
    s = codec.ring_scores(K, RingTile(first, start, C.RING, RING_TILE), program.query, SIDE, C)
    if C.SOFTCAP:
        s = soft_cap(s, program.scoring.softcap)
    s = tl.where(there, mask_ring(s, start + token_order(RING_TILE, 1), program, C), NOTHING)
    return _add(s, V, RingTile(first, start, C.RING, RING_TILE), program, sums, skips, codec, C)


@triton.jit
def ring_part(K, V, program, part, sums, skips, codec, C: tl.constexpr):
    """Attention over one of the `C.RING_PARTS` parts of the ring, in the order of its slots."""
    SLOTS: tl.constexpr = C.RING // C.RING_PARTS
    first = 0  # the only part has bounds that the compiler knows
    if C.RING_PARTS > 1:
        first = part * SLOTS
    for start in tl.range(first, first + SLOTS, RING_TILE, num_stages=1):
        if ring_tile_used(program.row, start, C):
            sums, skips = _ring_tile(K, V, program, start, True, sums, skips, codec, C)
    return sums, skips


@triton.jit
def last_sink(TABLE, bh, asked, C: tl.constexpr):
    """End of the used entries of a head's table of sinks; 0 where it is not `asked` for."""
    if C.ENTRIES > 0:
        e = tl.arange(0, C.ENTRIES)
        born = tl.load(TABLE.born + bh.to(tl.int64) * C.ENTRIES + e, mask=e < tl.where(asked, C.ENTRIES, 0), other=0)
        return tl.max(tl.where(born > 0, e + 1, 0), 0)
    else:
        return 0


@triton.jit
def sink_scores(pool, program, start, there, codec, C: tl.constexpr):
    """Scores of the entries from `start` on, with those gone that a query does not see; `there` as in `_ring_tile`.
    What says so comes in words, which every thread has."""
    SIDE: tl.constexpr = C.K
    p, scoring, of_head = program.q_pos, program.scoring, program.bh.to(tl.int64) * C.ENTRIES
    first = of_head + start
    bit = tl.arange(0, SINK_TILE)
    before, after = sinks_visible(pool.table, first + bit, program.row)
    before, after = tl.sum(before.to(tl.int32) << bit, 0), tl.sum(after.to(tl.int32) << bit, 0)
    s = codec.ring_scores(pool.k, RingTile(of_head, start, C.ENTRIES, SINK_TILE), program.query, SIDE, C)
    if C.SOFTCAP:
        s = soft_cap(s, scoring.softcap)
    word = tl.where(p >= visible_from(program.row, C), after, before)
    see = (((word[None, :] >> token_order(SINK_TILE, 1)[:, None]) & 1) == 1) & there
    if C.LOCAL:
        pos = to_token_order(tl.load(pool.table.pos + first + bit), 1)
        see = see & in_window(pos[:, None], p[None, :], scoring.window, C.CHUNKS)
    return tl.where(see, s, NOTHING)


@triton.jit
def _sink_tile(pool, program, start, there, sums, skips, codec, C: tl.constexpr):
    """Attention over the sinks of the entries from `start` on."""
    s = sink_scores(pool, program, start, there, codec, C)
    first = program.bh.to(tl.int64) * C.ENTRIES
    return _add(s, pool.v, RingTile(first, start, C.ENTRIES, SINK_TILE), program, sums, skips, codec, C)


@triton.jit
def sink_part(pool, program, sums, skips, codec, C: tl.constexpr):
    """Attention over the tokens that the sink pool keeps out of the blocks, in the order of the table."""
    for start in tl.range(0, pool.end, SINK_TILE, num_stages=2):
        sums, skips = _sink_tile(pool, program, start, True, sums, skips, codec, C)
    return sums, skips


@triton.jit
def open_part(K, V, pool, program, sums, skips, codec, C: tl.constexpr):
    """Attention over a whole ring, from the tile of its first open token on, and over the sinks: a tile of each a
    turn."""
    row = program.row
    RING_TILES: tl.constexpr = C.RING // RING_TILE
    SINK_TILES: tl.constexpr = C.ENTRIES // SINK_TILE
    first = row.open_start % C.RING // RING_TILE * RING_TILE
    used = row.open_start % C.RING - first + row.length + row.count - row.open_start
    turns = tl.minimum(tl.cdiv(used, RING_TILE), RING_TILES)
    if SINK_TILES > 0:  # a row without open tokens may have queries that see sinks
        turns = tl.maximum(turns, 1 if SINK_TILES == 1 else tl.cdiv(pool.end, SINK_TILE))
    for i in tl.range(0, turns, num_stages=2):
        there = True if SINK_TILES <= RING_TILES else i < RING_TILES
        sums, skips = _ring_tile(K, V, program, (first + i * RING_TILE) % C.RING, there, sums, skips, codec, C)
        if SINK_TILES > 0:
            start = tl.minimum(i, SINK_TILES - 1) * SINK_TILE
            sums, skips = _sink_tile(pool, program, start, i < SINK_TILES, sums, skips, codec, C)
    return sums, skips
