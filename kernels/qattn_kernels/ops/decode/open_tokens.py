"""Decode attention over the parts of the context outside the packed blocks: the ring and the sink pool.

Separate programs read the ring and the sinks. Both are short; reading one after the other would delay the merge. Where
programs wait for a place because there are many rows, one program reads both (`table.Shares.open`)."""

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
        end: end of the head's used entries.
    """

    k: Any
    v: Any
    table: Any
    end: Any


@triton.jit
def ring_tile_used(row, start, C: tl.constexpr):
    """Return whether ring slots from `start` on can hold an open or new token; one tile of `RING_TILE` slots."""
    behind = (start - row.open_start % C.RING + C.RING) % C.RING  # slots from the first open token to this tile
    return (behind < row.length + row.count - row.open_start) | (behind > C.RING - RING_TILE)


@triton.jit
def split_used(split, row, C: tl.constexpr):
    """Return whether a split can hold a token. Only the ring's parts are checked; every other split counts as used."""
    return (split >= C.RING_PARTS) | ring_tile_used(row, split * RING_TILE, C)


@triton.jit
def _add(s, V, tile, program, sums, skips, codec, C: tl.constexpr):
    """Add a `RingTile` with masked scores `s` to the sums. Returns the new `Sums` and `Skips`."""
    SIDE: tl.constexpr = C.V
    w, alpha, beta, m = weigh(s, sums.m, program.scoring.sas_threshold, C)
    acc, total = codec.ring_values(V, tile, w, sums.acc, alpha, beta, SIDE, C)
    if C.SPARSE_V:
        skips = Skips(skips.lost, skips.read + count_visible(s), skips.skipped)
    return Sums(m, sums.l * alpha + total * beta, acc), skips


@triton.jit
def _ring_tile(K, V, program, start, sums, skips, codec, C: tl.constexpr):
    """Attend to the ring slots from `start` on: open tokens and the call's new tokens."""
    SIDE: tl.constexpr = C.K
    first = program.bh.to(tl.int64) * C.RING
    s = codec.ring_scores(K, RingTile(first, start, C.RING, RING_TILE), program.query, SIDE, C)
    if C.SOFTCAP:
        s = soft_cap(s, program.scoring.softcap)
    s = mask_ring(s, start + token_order(RING_TILE, 1), program, C)
    return _add(s, V, RingTile(first, start, C.RING, RING_TILE), program, sums, skips, codec, C)


@triton.jit
def ring_part(K, V, program, part, sums, skips, codec, C: tl.constexpr):
    """Attend to part number `part` of the ring, which has `C.RING_PARTS` parts of equal size, in slot order."""
    SLOTS: tl.constexpr = C.RING // C.RING_PARTS
    first = 0  # with a single part, the compiler knows the bounds
    if C.RING_PARTS > 1:
        first = part * SLOTS
    for start in tl.range(first, first + SLOTS, RING_TILE, num_stages=1):
        if ring_tile_used(program.row, start, C):
            sums, skips = _ring_tile(K, V, program, start, sums, skips, codec, C)
    return sums, skips


@triton.jit
def last_sink(TABLE, bh, asked, C: tl.constexpr):
    """Return the end of the used entries in a head's sink table; 0 if `asked` is false.

    A pool of one tile counts as full: waiting for its table would delay its keys and values."""
    if C.ENTRIES == SINK_TILE:
        return tl.where(asked, C.ENTRIES, 0)
    elif C.ENTRIES > 0:
        e = tl.arange(0, C.ENTRIES)
        born = tl.load(TABLE.born + bh.to(tl.int64) * C.ENTRIES + e, mask=e < tl.where(asked, C.ENTRIES, 0), other=0)
        return tl.max(tl.where(born > 0, e + 1, 0), 0)
    else:
        return 0


@triton.jit
def sink_scores(pool, program, start, codec, C: tl.constexpr):
    """Return the masked scores of `SINK_TILE` sink entries from `start` on.

    Which entries are visible is packed into the bits of one integer, because every thread can hold that; a vector
    would move between threads."""
    SIDE: tl.constexpr = C.K
    p, scoring, of_head = program.q_pos, program.scoring, program.bh.to(tl.int64) * C.ENTRIES
    first = of_head + start
    bit = tl.arange(0, SINK_TILE)
    before, after = sinks_visible(pool.table, first + bit, program.row)
    s = codec.ring_scores(pool.k, RingTile(of_head, start, C.ENTRIES, SINK_TILE), program.query, SIDE, C)
    if C.SOFTCAP:
        s = soft_cap(s, scoring.softcap)
    # after the product, because these sums wait for the table
    before, after = tl.sum(before.to(tl.int32) << bit, 0), tl.sum(after.to(tl.int32) << bit, 0)
    word = tl.where(p >= visible_from(program.row, C), after, before)
    see = ((word[None, :] >> token_order(SINK_TILE, 1)[:, None]) & 1) == 1
    if C.LOCAL:
        pos = to_token_order(tl.load(pool.table.pos + first + bit), 1)
        see = see & in_window(pos[:, None], p[None, :], scoring.window, C.CHUNKS)
    return tl.where(see, s, NOTHING)


@triton.jit
def sink_part(pool, program, sums, skips, codec, C: tl.constexpr):
    """Attend to the sinks that the pool keeps outside the blocks, in table order."""
    for start in tl.range(0, pool.end, SINK_TILE, num_stages=2):
        s = sink_scores(pool, program, start, codec, C)
        first = program.bh.to(tl.int64) * C.ENTRIES
        sums, skips = _add(s, pool.v, RingTile(first, start, C.ENTRIES, SINK_TILE), program, sums, skips, codec, C)
    return sums, skips
