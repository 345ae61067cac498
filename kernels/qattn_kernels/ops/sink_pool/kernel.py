"""SinkQ's pool in Triton. `ops/sink_pool/reference.py` is the specification, `table.py` explains the sink table.

A closing block lets its keys compete with the sinks of the pool, and the smallest keys win. The winners are masked in
their block (bits of `dropped`) and read from the table instead. A decode reads the table as it is after the append, and
the bits as they were before the call. Changes made by a close apply to queries from `visible_from` on, as in single
steps. The bits are updated when every program has read them."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.jit.math import round_even
from qattn_kernels.jit.rows import FOREVER, flip_bits, packed_since, slot_bits
from qattn_kernels.jit.tokens import Source, from_ring, new_tokens, ring_codes, row_before, with_ring
from qattn_kernels.launch.call import SinkTensors, Table
from qattn_kernels.launch.unpacked_kv import UnpackedTensors
from qattn_kernels.layout import BlockState

UNDECIDED = tl.constexpr(9223372036854775807)  # larger than any entry's age


@triton.jit
def visible_from(row, C: tl.constexpr):
    """Return the first query position of a short call that sees the changes of its close. A short call closes at most
    one block."""
    return tl.where(row.closing > 0, packed_since(0, row.open_start, C), FOREVER)


@triton.jit
def moved_tokens(MOVED, block, t, bh, C: tl.constexpr):
    """Return which tokens `t` of the row's block number `block` this call's close moved into the table or out of it.
    `MOVED`: `SinkTensors.moved`."""
    moved = t < 0
    for i in tl.static_range(2 * C.SINKS):
        moved = moved | (tl.load(MOVED + bh * (2 * C.SINKS) + i) == block * C.BLOCK + t)
    return moved


@triton.jit
def _note_moved(MOVED, entries, closed, bh, C: tl.constexpr):
    """Store the slots of the tokens that one close moved: at most `SINKS` into the table and `SINKS` out of it."""
    moved = (entries.born > closed) ^ (entries.written > closed)
    last = tl.full([], -1, tl.int32)
    for i in range(2 * C.SINKS):
        last = tl.min(tl.where(moved & (entries.slot > last), entries.slot, FOREVER), 0)
        tl.store(MOVED + bh * (2 * C.SINKS) + i, last)


@triton.jit
def sinks_visible(TABLE, at, row):
    """Return which entries `at` are visible to queries before `visible_from`, and which to later queries."""
    born, written = tl.load(TABLE.born + at), tl.load(TABLE.written + at)
    before = (born > 0) & (born <= row.closed) & ((written == 0) | (written > row.closed))
    return before, (born > 0) & (written == 0)


@triton.jit
def load_table(TABLE, at):
    pos, slot, norm = tl.load(TABLE.pos + at), tl.load(TABLE.slot + at), tl.load(TABLE.norm + at)
    return Table(pos, slot, tl.load(TABLE.born + at), tl.load(TABLE.evicted + at), tl.load(TABLE.written + at), norm)


@triton.jit
def store_table(TABLE, at, entries):
    tl.store(TABLE.pos + at, entries.pos)
    tl.store(TABLE.slot + at, entries.slot)
    tl.store(TABLE.born + at, entries.born)
    tl.store(TABLE.evicted + at, entries.evicted)
    tl.store(TABLE.written + at, entries.written)
    tl.store(TABLE.norm + at, entries.norm)


@triton.jit
def _take(entries, size, t, pos, slot, count, C: tl.constexpr):
    """Let the smallest key of a block compete with the pool's largest one; ties go to the older key.

    `size` fp64 `[BLOCK]`: sizes of the block's keys at row positions `pos + t` and slots `slot + t`. `count`: the row's
    closed blocks, this one included, which is the time that an entry records.

    Returns the entries, the remaining key sizes, and bool `[BLOCK]`: the token taken, if any."""
    entry_pos, entry_slot, born, evicted, written, norm = entries
    best = tl.min(size, 0)
    index = tl.min(tl.where(size == best, t, C.BLOCK), 0)
    inside = (born > 0) & (evicted == 0)
    members = tl.sum(inside.to(tl.int32), 0)
    worst = tl.max(tl.where(inside, norm, float("-inf")), 0)
    takes = best < _least(entries, C)
    rival = inside & (norm == worst)
    last = tl.where(takes & (members == C.SINKS), tl.max(tl.where(rival, entry_pos, -1), 0), -1)
    evicted = tl.where(rival & (entry_pos == last), count, evicted)
    e = tl.arange(0, C.ENTRIES)
    mine = e == tl.where(takes, tl.min(tl.where(born == 0, e, C.ENTRIES), 0), -1)
    entry_pos, entry_slot = tl.where(mine, pos + index, entry_pos), tl.where(mine, slot + index, entry_slot)
    born, norm = tl.where(mine, count, born), tl.where(mine, best, norm)
    hit = t == tl.where(takes, index, -1)
    return Table(entry_pos, entry_slot, born, evicted, written, norm), tl.where(hit, float("inf"), size), hit


@triton.jit
def _least(entries, C: tl.constexpr):
    """Return the size below which a key joins the pool: the size of the pool's largest key, or infinity while it has
    room."""
    inside = (entries.born > 0) & (entries.evicted == 0)
    worst = tl.max(tl.where(inside, entries.norm, float("-inf")), 0)
    return tl.where(tl.sum(inside.to(tl.int32), 0) < C.SINKS, float("inf"), worst)


@triton.jit
def _write_back(entries, count, C: tl.constexpr):
    """If the window of evicted sinks overflows, mark its oldest entry as written back, so that it is read from its
    block."""
    pos, slot, born, evicted, written, norm = entries
    waiting = (evicted > 0) & (written == 0)
    age = evicted.to(tl.int64) * 4294967296 + pos
    oldest = tl.min(tl.where(waiting, age, UNDECIDED), 0)
    oldest = tl.where(tl.sum(waiting.to(tl.int32), 0) > C.EVICTED, oldest, -1)
    return Table(pos, slot, born, evicted, tl.where(waiting & (age == oldest), count, written), norm)


@triton.jit
def _forget(entries, until, closed, flags):
    """Free the entries that were written back at close number `until` or before, which no crop can restore.

    A short call frees only entries that earlier calls wrote back. It flips no bit, so `flags` may belong to a page
    pool."""
    pos, slot, born, evicted, written, norm = entries
    gone = (written > 0) & (written <= until)
    flip_bits(flags, slot, gone & (written > closed) & (born <= closed))
    pos, slot, norm = tl.where(gone, 0, pos), tl.where(gone, 0, slot), tl.where(gone, 0.0, norm)
    return Table(pos, slot, tl.where(gone, 0, born), tl.where(gone, 0, evicted), tl.where(gone, 0, written), norm)


@triton.jit
def _magnitudes(K, code, scale):
    """Return fp64 sums of the magnitudes of keys `[n, DP]`. INT8 magnitudes are integers, so fp32 sums them exactly."""
    if K.ring.dtype.element_ty == tl.int8:
        return tl.sum(tl.abs(code), 1).to(tl.float64) * scale.to(tl.float64)
    else:
        return tl.sum(tl.abs(code).to(tl.float64), 1)


@triton.jit
def key_sizes(source, K, bits, row, b, h, j, QUANTIZE: tl.constexpr, C: tl.constexpr):
    """Return the fp64 key sizes `[BLOCK]` of a closing block with mask bits at `bits`; infinity for masked tokens."""
    length, closed, open_start, closing, first, count = row
    t = tl.arange(0, C.BLOCK)
    pos = open_start + j * C.BLOCK + t
    old = pos < length
    k, v, bad = new_tokens(source, b, h, pos - length, ~old, first, C)
    code, scale = QUANTIZE(k)
    SIDE: tl.constexpr = C.K
    code, scale = with_ring(K, code, scale, pos, old, b * C.H + h, SIDE, C)
    dropped = old & (slot_bits(bits, t) == 1)
    return tl.where(bad | dropped, float("inf"), _magnitudes(K, code, scale))


@triton.jit
def fill(S, code, scale, write, bh, ENTRIES: tl.constexpr, SIDE: tl.constexpr):
    """Write the tokens `[ENTRIES, DP]` of sink entries, where `write` is true, in the form of the ring."""
    e = tl.arange(0, ENTRIES)
    inside = write[:, None] & (tl.arange(0, SIDE.DP) < SIDE.D)[None, :]
    tl.store(ring_codes(S, e, ENTRIES, bh, SIDE), code.to(S.ring.dtype.element_ty), mask=inside)
    if S.ring.dtype.element_ty == tl.int8:
        tl.store(S.ring_scale + bh.to(tl.int64) * ENTRIES + e, scale, mask=write)


@triton.jit(do_not_specialize=["span_stride", "NB"])
def sizes_kernel(SOURCE, SPANS, span_stride, LAYER, SIZES, NB, K_QUANTIZE: tl.constexpr, C: tl.constexpr):
    """Compute `key_sizes` of all blocks that a long call closes. One program per (block of the open span, head, row).

    Writes `SIZES` fp64 `[B, H, blocks, BLOCK]`. The pool meets blocks one after another, but the sizes can run in
    parallel."""
    j, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, dropped = row_before(LAYER, SPANS, span_stride, b, NB, C), BlockState(*LAYER.blocks).dropped
    if j < tl.minimum(row.closing, NB - row.closed):
        bh = b * C.H + h
        bits = dropped + (bh.to(tl.int64) * NB + row.closed + j) * (C.BLOCK // 8)
        size = key_sizes(Source(*SOURCE), LAYER.k, bits, row, b, h, j, K_QUANTIZE, C)
        at = (bh.to(tl.int64) * tl.num_programs(0) + j) * C.BLOCK
        tl.store(SIZES + at + tl.arange(0, C.BLOCK), size)


@triton.jit
def first_sinks(size, C: tl.constexpr):
    """Return bool `[BLOCK]`: the tokens that an empty pool takes from a block with key sizes `size`.

    It takes the smallest keys; ties go to the oldest."""
    SINKS: tl.constexpr = C.SINKS
    t = tl.arange(0, C.BLOCK)
    chosen = t < 0
    for _ in tl.static_range(SINKS):
        size = tl.where(chosen, float("inf"), size)
        best = tl.min(size, 0)
        index = tl.min(tl.where(size == best, t, C.BLOCK), 0)
        chosen = chosen | (t == tl.where(best < float("inf"), index, -1))
    return chosen


@triton.jit
def _meet(entries, least, size, j, row, flags, C: tl.constexpr):
    """Let the pool compete with block `j` of the open span, which has key sizes `size`.

    Returns the new entries, their `_least`, and bool `[BLOCK]` for the tokens taken. Most blocks have no key small
    enough and change nothing."""
    SINKS: tl.constexpr = C.SINKS
    t = tl.arange(0, C.BLOCK)
    total, chosen = row.closed + j + 1, t < 0
    if tl.min(size, 0) < least:
        entries = _forget(entries, total - C.CROP_BLOCKS, row.closed, flags)
        for _ in range(SINKS):
            entries, size, hit = _take(entries, size, t, row.open_start + j * C.BLOCK, (total - 1) * C.BLOCK, total, C)
            chosen = chosen | hit
        for _ in range(SINKS):
            entries = _write_back(entries, total, C)
        least = _least(entries, C)
    return entries, least, chosen


@triton.jit
def _keep_table(source, K, V, sinks, entries, row, b, h, K_QUANTIZE: tl.constexpr, V_QUANTIZE: tl.constexpr,
                C: tl.constexpr):  # fmt: skip
    """Store the table and the tokens of its new entries, after the last closing block."""
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    bh = b * C.H + h
    store_table(sinks.table, bh.to(tl.int64) * C.ENTRIES + tl.arange(0, C.ENTRIES), entries)
    pos, born = entries.pos, entries.born
    new, fresh = born > row.closed, pos - row.length
    k, v, _ = new_tokens(source, b, h, fresh, new & (fresh >= 0), row.first, C)
    k_code, k_scale = K_QUANTIZE(k)
    v_code, v_scale = V_QUANTIZE(v)
    k_code, k_scale = with_ring(K, k_code, k_scale, pos, new & (fresh < 0), bh, K_SIDE, C)
    v_code, v_scale = with_ring(V, v_code, v_scale, pos, new & (fresh < 0), bh, V_SIDE, C)
    fill(sinks.k, k_code, k_scale, new | (born == 0), bh, C.ENTRIES, K_SIDE)
    fill(sinks.v, v_code, v_scale, new | (born == 0), bh, C.ENTRIES, V_SIDE)


@triton.jit
def _keep_tokens(S, SINKS, entries, closed, bh, SIDE: tl.constexpr, C: tl.constexpr):
    """Copy the tokens of new entries from the ring; free places get zeros."""
    new, e, slot = entries.born > closed, tl.arange(0, C.ENTRIES), entries.pos % C.RING
    write, d = new | (entries.born == 0), (tl.arange(0, SIDE.DP) < SIDE.D)[None, :]
    x = tl.load(ring_codes(S, slot, C.RING, bh, SIDE), mask=new[:, None] & d, other=0)
    tl.store(ring_codes(SINKS, e, C.ENTRIES, bh, SIDE), x, mask=write[:, None] & d)
    if S.ring.dtype.element_ty == tl.int8:
        scale = tl.load(S.ring_scale + bh.to(tl.int64) * C.RING + slot, mask=new, other=0.0)
        tl.store(SINKS.ring_scale + bh.to(tl.int64) * C.ENTRIES + e, scale, mask=write)


@triton.jit
def compete(K, V, sinks, flags, masked, row, bh, C: tl.constexpr):
    """Let the pool of a head compete with the one block that a short call closes. Runs inside the append.

    The ring must hold the call's tokens. `masked` bool `[BLOCK]` tokens do not compete. Returns bool `[BLOCK]`, the
    tokens taken, and stores moved slots to `sinks.moved` (see `moved_tokens`). Most blocks change nothing and are only
    read."""
    t = tl.arange(0, C.BLOCK)
    at = bh.to(tl.int64) * C.ENTRIES + tl.arange(0, C.ENTRIES)
    entries = load_table(sinks.table, at)
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    code, scale = from_ring(K, row.open_start + t, t >= 0, bh, K_SIDE, C)
    size = tl.where(masked, float("inf"), _magnitudes(K, code, scale))
    least, until, chosen = _least(entries, C), row.closed + 1 - C.CROP_BLOCKS, t < 0
    gone = (entries.written > 0) & (entries.written <= until)
    if (tl.min(size, 0) < least) | (tl.max(gone.to(tl.int32), 0) > 0):
        entries, least, chosen = _meet(entries, least, size, 0, row, flags, C)
        entries = _forget(entries, until, row.closed, flags)
        store_table(sinks.table, at, entries)
        _keep_tokens(K, sinks.k, entries, row.closed, bh, K_SIDE, C)
        _keep_tokens(V, sinks.v, entries, row.closed, bh, V_SIDE, C)
        _note_moved(sinks.moved, entries, row.closed, bh, C)
    else:
        for i in tl.static_range(2 * C.SINKS):
            tl.store(sinks.moved + bh * (2 * C.SINKS) + i, FOREVER)
    return chosen


@triton.jit(do_not_specialize=["span_stride", "NB", "open_blocks"])
def pool_kernel(SOURCE, SPANS, span_stride, LAYER, SIZES, NB, open_blocks, K_QUANTIZE: tl.constexpr,
                V_QUANTIZE: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Let the pool compete with each block that a long call closes. One program per (head, row), before the append.

    `SIZES` is the output of `sizes_kernel`. Stores bits for the tokens taken
    from the `open_blocks` blocks of the open span."""
    h, b = tl.program_id(0), tl.program_id(1)
    row, dropped = row_before(LAYER, SPANS, span_stride, b, NB, C), BlockState(*LAYER.blocks).dropped
    closing = tl.minimum(row.closing, NB - row.closed)
    if closing > 0:
        bh, t, sinks = b * C.H + h, tl.arange(0, C.BLOCK), LAYER.sinks
        flags = dropped + bh.to(tl.int64) * NB * (C.BLOCK // 8)
        entries = load_table(sinks.table, bh.to(tl.int64) * C.ENTRIES + tl.arange(0, C.ENTRIES))
        least = _least(entries, C)
        for j in range(0, closing):
            size = tl.load(SIZES + (bh.to(tl.int64) * open_blocks + j) * C.BLOCK + t)
            entries, least, chosen = _meet(entries, least, size, j, row, flags, C)
            eights = tl.reshape(chosen.to(tl.int32) << (t % 8), (C.BLOCK // 8, 8))
            byte = sinks.chosen + (bh.to(tl.int64) * open_blocks + j) * (C.BLOCK // 8) + tl.arange(0, C.BLOCK // 8)
            tl.store(byte, tl.sum(eights, 1).to(tl.uint8))
        entries = _forget(entries, row.closed + closing - C.CROP_BLOCKS, row.closed, flags)
        _keep_table(Source(*SOURCE), LAYER.k, LAYER.v, sinks, entries, row, b, h, K_QUANTIZE, V_QUANTIZE, C)


@triton.jit
def _restore(S, X, SCALE, slot, live, bh, slots, SIDE: tl.constexpr, C: tl.constexpr):
    """Write entries to the unpacked keys and values: as numbers, or as INT8 with their slot's scale.

    A tile may apply that scale to its whole block."""
    e, d = tl.arange(0, C.ENTRIES), tl.arange(0, SIDE.DP)
    inside = live[:, None] & (d < SIDE.D)[None, :]
    code = tl.load(ring_codes(S, e, C.ENTRIES, bh, SIDE), mask=inside, other=0.0).to(tl.float32)
    where = slot[:, None].to(tl.int64) * SIDE.D + d[None, :]
    if S.ring.dtype.element_ty == tl.int8:
        scale = tl.load(S.ring_scale + bh.to(tl.int64) * C.ENTRIES + e, mask=live, other=0.0)
    if X.dtype.element_ty != tl.int8:
        if S.ring.dtype.element_ty == tl.int8:
            code = code * scale[:, None]
    else:
        unit = tl.load(SCALE + bh.to(tl.int64) * slots + slot, mask=live, other=0.0)
        code = code * tl.where(unit == 0.0, 0.0, scale / tl.where(unit == 0.0, 1.0, unit))[:, None]
        code = tl.clamp(round_even(tl.clamp(code, -127.0, 127.0)), -127.0, 127.0)
        if SIDE.VALUES:
            where = d[None, :].to(tl.int64) * slots + slot[:, None]
    tl.store(X + bh.to(tl.int64) * slots * SIDE.D + where, code.to(X.dtype.element_ty), mask=inside)


@triton.jit
def restore_kernel(SINKS, UNPACKED, C: tl.constexpr):
    """Write the sinks to their slots of the unpacked keys and values. One program per (head, row), before the pool
    competes."""
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    unpacked, sinks = UnpackedTensors(*UNPACKED), SinkTensors(*SINKS)
    bh = tl.program_id(1) * C.H + tl.program_id(0)
    at = bh.to(tl.int64) * C.ENTRIES + tl.arange(0, C.ENTRIES)
    slot = tl.load(sinks.table.slot + at)
    live = (tl.load(sinks.table.born + at) > 0) & (tl.load(sinks.table.written + at) == 0)
    _restore(sinks.k, unpacked.k, unpacked.k_scale, slot, live, bh, unpacked.slots, K_SIDE, C)
    _restore(sinks.v, unpacked.v, unpacked.v_scale, slot, live, bh, unpacked.slots, V_SIDE, C)
    tl.store(unpacked.bias + bh.to(tl.int64) * unpacked.slots + slot, tl.full([C.ENTRIES], 0, tl.float32), mask=live)
