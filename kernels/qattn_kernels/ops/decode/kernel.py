"""Decode attention in Triton: one program a split of the context, and one for the open tokens; then a merge.

TurboAttention, Algorithm 2, with the key channel scale folded into the query and the value channel scale into the
accumulator. `ops/decode/reference.py` is the specification. Queries are columns, scores are in log2 units.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats.head_bits import ALL, NONE
from qattn_kernels.jit.math import LN2, LOG2E, broken, round_even
from qattn_kernels.jit.rows import commit_row, load_row, packed_since, settle_sinks, slot_bits
from qattn_kernels.jit.split_int8 import split_int8
from qattn_kernels.jit.tile_order import token_order
from qattn_kernels.ops.decode.weights import NOTHING, known_mass, may_skip, seen_by, soft_cap, weigh
from qattn_kernels.ops.sink_pool.kernel import sinks_seen, swapped, turn_of

RING_TILE = tl.constexpr(64)  # slots of the ring at a time, which it is a multiple of
SINK_TILE = tl.constexpr(32)  # entries of the table of sinks at a time
FOREVER = tl.constexpr(2147483647)  # a row position that no query reaches


@triton.jit
def load_queries(Q, strides, b, h, n, t, real, first, scale, C: tl.constexpr):
    """`[DP, Q]` queries as they came, scaled in fp32, and with one scale each as INT8 pairs `[DP, 2 Q]` or in fp16;
    that scale; what INT8 pairs were made of, in [-127, 127]; and which are not finite and stand as zeros here."""
    d = tl.arange(0, C.DP)
    head, column = h * C.G + n % C.G, first + t
    base = b.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + column.to(tl.int64) * strides[2]
    spread = tl.max_contiguous(d, 1)  # so lanes hold neighbours, and bytes made of them meet in no bank
    q = tl.load(Q + base[None, :] + spread[:, None], mask=real[None, :] & (d < C.D)[:, None], other=0.0)
    bad = broken(q.to(tl.float32), 0)
    q = tl.where(bad[None, :], 0.0, q)
    scaled = q.to(tl.float32) * scale
    top = tl.max(tl.abs(scaled), 0) + 1e-30
    unit = scaled * (127.0 / top)[None, :]
    if C.Q_LEVELS < 8:  # asked for; INT8 pairs err less than eight bits do
        unit = round_even(unit * (C.Q_LEVELS / 127.0)) * (127.0 / C.Q_LEVELS)
    if C.N > C.Q:
        return q, scaled, split_int8(unit * 256.0, C), top * (1.0 / 127.0), unit, bad
    else:
        return q, scaled, (scaled * (1.0 / top)[None, :]).to(tl.float16), top, unit, bad


@triton.jit
def _open_seen(s, slot, dropped, row, p, window, C: tl.constexpr):
    """Scores of slots of the ring, with those gone that a query may not see, or reads from codes."""
    length, closed, open_start, closing, first, count = row
    last = length + count - 1
    pos = last - (last - slot + C.RING) % C.RING
    inside = pos >= open_start
    offset = tl.where(inside, pos - open_start, 0)
    keep = inside & (slot_bits(dropped, closed * C.BLOCK + offset) == 0)
    block = offset // C.BLOCK
    until = tl.where(block < closing, packed_since(block, open_start, C), FOREVER)
    see = keep[:, None] & (pos[:, None] <= p[None, :]) & (p[None, :] < until[:, None])
    if C.LOCAL:
        see = see & (pos[:, None] > (p - window)[None, :])
    return tl.where(see, s, NOTHING)


@triton.jit
def open_part(K, V, dropped, row, p, query, scores_of, m, l, acc, read, bh, SCORES: tl.constexpr, VALUES: tl.constexpr,
              C: tl.constexpr):  # fmt: skip
    """Attention over the ring, in the order of its slots: the tokens that were open before the call and its own."""
    length, closed, open_start, closing, first, count = row
    scale, cap, window, threshold = scores_of
    at = bh.to(tl.int64) * C.RING
    for start in tl.range(0, C.RING, RING_TILE, num_stages=1):
        behind = (start - open_start % C.RING + C.RING) % C.RING  # slots from the first open token to this tile
        if (behind < length + count - open_start) | (behind > C.RING - RING_TILE):
            s = SCORES(K, at + start, RING_TILE, query, scale, C)
            if C.CAP:
                s = soft_cap(s, cap)
            s = _open_seen(s, start + token_order(RING_TILE, 1), dropped, row, p, window, C)
            w, alpha, beta, m = weigh(s, m, threshold, C)
            acc, total = VALUES(V, at, start, C.RING, RING_TILE, w, acc, alpha, beta, C)
            l = l * alpha + total * beta
            if C.SPARSE:
                read += seen_by(s, C)
    return m, l, acc, read


@triton.jit
def sink_scores(K, TABLE, row, p, query, scores_of, first, at, SCORES: tl.constexpr, C: tl.constexpr):
    """Scores of entries `at` `[SINK_TILE]` of the tables of all heads, one behind the other from `first` on."""
    scale, cap, window, threshold = scores_of
    s = SCORES(K, first, SINK_TILE, query, scale, C)
    if C.CAP:
        s = soft_cap(s, cap)
    return tl.where(sinks_seen(TABLE, at, row, p, window, C), s, NOTHING)


@triton.jit
def sink_part(K, V, TABLE, row, p, query, scores_of, m, l, acc, read, bh, SCORES: tl.constexpr, VALUES: tl.constexpr,
              C: tl.constexpr):  # fmt: skip
    """Attention over the tokens that the sink pool keeps out of the blocks, in the order of the table."""
    first = bh.to(tl.int64) * C.ENTRIES
    for start in tl.range(0, C.ENTRIES, SINK_TILE, num_stages=1):
        at = first + start + token_order(SINK_TILE, 1)
        if tl.max(tl.load(TABLE.born + at), 0) > 0:
            s = sink_scores(K, TABLE, row, p, query, scores_of, first + start, at, SCORES, C)
            w, alpha, beta, m = weigh(s, m, scores_of[3], C)
            acc, total = VALUES(V, first, start, C.ENTRIES, SINK_TILE, w, acc, alpha, beta, C)
            l = l * alpha + total * beta
            if C.SPARSE:
                read += seen_by(s, C)
    return m, l, acc, read


@triton.jit
def masked_words(words, block, C: tl.constexpr):
    """The bits of a block's masked tokens, in four scalars whatever its size."""
    WORDS: tl.constexpr = C.BLOCK // 32
    at = words + block * WORDS
    first, second = tl.load(at), tl.load(at + min(1, WORDS - 1))
    if WORDS > 2:
        return first, second, tl.load(at + 2), tl.load(at + 3)
    else:
        return first, second, first, second


@triton.jit
def unseen(s, block, row, p, masked, block_pos, tokens, window, MOVED, bh, C: tl.constexpr):
    """Scores of a block of so many `tokens` with those gone that a query may not see. Of scalars alone: what a thread
    loads for others goes through shared memory, once for each layout in which the compiler keeps scores."""
    length, closed, open_start, closing, first, count = row
    t = token_order(C.BLOCK, C.PARTS)
    low, high = tl.where(t < 32, masked[0], masked[1]), tl.where(t < 96, masked[2], masked[3])
    keep = (tl.where(t < 64, low, high) >> (t % 32)) & 1 == 0
    late = block >= closed
    if C.RING > 0:  # closed by this call: read by queries that single steps would let read it
        start = tl.load(block_pos + block)
        keep = keep & (t < tokens)
        see = (~late) | (p >= packed_since(block - closed, open_start, C))
        if C.ENTRIES > 0:
            moved = t < 0
            if closing > 0:
                moved = swapped(MOVED, block, t, bh, C)
            see = (keep[:, None] ^ (moved[:, None] & (p >= turn_of(row, C))[None, :])) & see[None, :]
        else:
            see = keep[:, None] & see[None, :]
    else:  # tokens stand in their final form at once
        start = tl.where(late, open_start + (block - closed) * C.BLOCK, tl.load(block_pos + block))
        keep = keep & (late | (t < tokens))
        see = keep[:, None] & ((~late) | ((start + t)[:, None] <= p[None, :]))
    if C.LOCAL:
        see = see & ((start + t)[:, None] > (p - window)[None, :])
    return tl.where(see, s, NOTHING)


@triton.jit
def packed_scores(K, dropped, MOVED, bh, block_pos, block_len, row, p, query, scores_of, block, head, k_head,
                  SCORES: tl.constexpr, K_BITS: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Scores of a block of the arenas, and how many of its tokens each query sees, which only sparse V asks."""
    scale, cap, window, threshold = scores_of
    s = SCORES(K, head + block, k_head + block, query, scale, K_BITS, C)
    if C.SMOOTH:
        s += query[5][None, :]
    if C.CAP:
        s = soft_cap(s, cap)
    masked, tokens = masked_words(dropped.to(tl.pointer_type(tl.int32)), block, C), tl.load(block_len + block)
    count = tl.full(p.shape, C.BLOCK, tl.int32)
    some = (masked[0] | masked[1] | masked[2] | masked[3]) != 0
    if some | (tokens != C.BLOCK) | (block >= row[1]) | C.LOCAL:
        s = unseen(s, block, row, p, masked, block_pos, tokens, window, MOVED, bh, C)
        if C.SPARSE:
            count = seen_by(s, C)
    return s, count


@triton.jit
def packed_part(K, V, dropped, MOVED, bh, block_pos, block_len, row, p, query, scores_of, limits, known, m, l, acc,
                lost, read, skipped, begin, end, head, k_head, v_head, SCORES: tl.constexpr, VALUES: tl.constexpr,
                K_BITS: tl.constexpr, V_BITS: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Attention over the blocks `begin` to `end` of the arenas, whose first blocks of this head are `head`, and among
    those of its width `k_head` and `v_head`. Sparse V: `lost` of `l` belongs to values that were not read."""
    threshold, own = scores_of[3], 0.0
    if C.SPARSE and C.ENTRIES == 0:  # a part that judged by its own tokens alone would find few to skip
        s, _ = packed_scores(
            K, dropped, MOVED, bh, block_pos, block_len, row, p, query, scores_of, 0, head, k_head, SCORES, K_BITS, C
        )
        known, own = known_mass(s, threshold, C), (begin == 0).to(tl.float32)
    for block in tl.range(begin, end, num_stages=STAGES):
        s, count = packed_scores(
            K, dropped, MOVED, bh, block_pos, block_len, row, p, query, scores_of, block, head, k_head, SCORES, K_BITS,
            C,
        )  # fmt: skip
        w, alpha, beta, m = weigh(s, m, threshold, C)
        if C.SPARSE:
            total = tl.sum(w, 0)
            read += count
            lost *= alpha
            if may_skip(p, m, beta, l * alpha + total * beta, lost + total * beta, known, own, limits):
                acc = acc * alpha[None, :]
                lost += total * beta
                skipped += count
            else:
                acc, total = VALUES(V, head + block, v_head + block, w, acc, alpha, beta, V_BITS, C)
        else:
            acc, total = VALUES(V, head + block, v_head + block, w, acc, alpha, beta, V_BITS, C)
        l = l * alpha + total * beta
    return m, l, acc, lost, read, skipped


@triton.jit
def packed_by_width(K, V, dropped, MOVED, block_pos, block_len, row, p, query, scores_of, limits, known, m, l, acc,
                    lost, read, skipped, begin, end, b, h, NB, K_LOCATE: tl.constexpr, V_LOCATE: tl.constexpr,
                    SCORES: tl.constexpr, VALUES: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """`packed_part` with a loop of its own for each pair of widths: loads inside a branch are not pipelined."""
    _, k_head, k_low = K_LOCATE(K, b, h, C.K_LOW, C)
    _, v_head, v_low = V_LOCATE(V, b, h, C.V_LOW, C)
    head, k_head, v_head = (b * C.H + h).to(tl.int64) * NB, k_head * NB, v_head * NB
    if C.K_LOW <= ALL and C.V_LOW <= ALL:
        m, l, acc, lost, read, skipped = packed_part(
            K, V, dropped, MOVED, b * C.H + h, block_pos, block_len, row, p, query, scores_of, limits, known, m, l, acc,
            lost, read, skipped, begin, end, head, k_head, v_head, SCORES, VALUES, C.K_BITS, C.V_BITS, STAGES, C,
        )  # fmt: skip
    else:
        for pair in tl.static_range(4):  # both 4 bits, K 2, V 2, both 2
            if (C.K_LOW > NONE if pair % 2 else C.K_LOW != ALL) and (C.V_LOW > NONE if pair // 2 else C.V_LOW != ALL):
                if (k_low == (pair % 2 == 1)) & (v_low == (pair // 2 == 1)):
                    m, l, acc, lost, read, skipped = packed_part(
                        K, V, dropped, MOVED, b * C.H + h, block_pos, block_len, row, p, query, scores_of, limits,
                        known, m, l, acc, lost, read, skipped, begin, end, head, k_head, v_head, SCORES, VALUES,
                        4 >> pair % 2, 4 >> pair // 2, STAGES, C,
                    )  # fmt: skip
    return m, l, acc, lost, read, skipped


@triton.jit
def blocks_seen(row, NB, C: tl.constexpr):
    """Blocks of the arenas that some query of the call reads; never more than there are."""
    length, closed, open_start, closing, first, count = row
    if C.RING == 0:
        blocks = closed + tl.cdiv(length + count - open_start, C.BLOCK)
    elif C.ONE and C.SPAN == C.BLOCK and C.RESIDUAL == 0:
        blocks = closed  # the block that one token closes is still read from the ring
    else:
        blocks = closed + closing
    return tl.minimum(blocks, NB)


@triton.jit
def stretch_of(blocks, splits, plan, C: tl.constexpr):
    """Packed blocks of one program, by the row's own length, whatever the capacity.

    `plan`: programs that share a context, and a long one; blocks of a program that make it long; least blocks of one.
    """
    few, many, long, least = plan
    sharing = tl.minimum(tl.where(blocks < few * long, few, many), splits - C.OPEN)
    return tl.maximum(tl.cdiv(blocks, sharing), least)


@triton.jit
def decode_kernel(Q, strides, ROWS, K, V, MEAN, K_SINKS, V_SINKS, TABLE, MOVED, DROPPED, BLOCK_POS, BLOCK_LEN, STATE,
                  OUT, STATS, SKIP_COUNTS, NB, B, T, scores_of, limits, plan, STAGES: tl.constexpr, BP: tl.constexpr,
                  K_LOCATE: tl.constexpr, V_LOCATE: tl.constexpr, SCORES: tl.constexpr, VALUES: tl.constexpr,
                  CHANNELS: tl.constexpr, RING_SCORES: tl.constexpr, RING_VALUES: tl.constexpr,
                  C: tl.constexpr):  # fmt: skip
    """Program (row and head, queries, split): a part of the context for up to `Q` queries; the first split is the ring,
    the second the sinks that are kept out of the blocks. Those of all rows start first: one of them may take longest,
    and one that starts late would be waited for.

    The other splits share a row's blocks evenly, as `plan` says (`stretch_of`).

    `OUT` fp32 `[B * H, splits, T * G, D]`, `STATS` the same with 2 for D: maximum and sum of the weights; with sparse V
    3: what of that sum was dropped. `SKIP_COUNTS`, `limits` (tau, budget): of sparse V.
    """
    STAT: tl.constexpr = 3 if C.SPARSE else 2
    bh, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = bh // C.H, bh % C.H
    row = load_row(ROWS, b)
    n = tile * C.Q + tl.arange(0, C.Q)
    t = n // C.G
    real = t < row[5]
    p = tl.where(real, row[0] + t, -1)
    splits = tl.num_programs(2)
    blocks = blocks_seen(row, NB, C)
    stretch = stretch_of(blocks, splits, plan, C)
    begin = (split - C.OPEN) * stretch
    end = tl.minimum(begin + stretch, blocks)
    if (split == 0) & (tile == 0) & (h == 0):
        commit_row(ROWS, STATE, row, b, B, T, BP, C)
    if (split < C.OPEN) | (begin < end):
        query = load_queries(Q, strides, b, h, n, t, real, row[4], scores_of[0], C)
        m, l = tl.full([C.Q], NOTHING, tl.float32), tl.full([C.Q], 0, tl.float32)
        acc = tl.full([C.DP, C.Q], 0, tl.float32)
        lost, read, skipped = tl.full([C.Q], 0, tl.float32), tl.full([C.Q], 0, tl.int32), tl.full([C.Q], 0, tl.int32)
        dropped = DROPPED + bh.to(tl.int64) * NB * (C.BLOCK // 8)
        if split < C.OPEN:
            if C.RING > 0:
                if split == 0:
                    m, l, acc, read = open_part(
                        K, V, dropped, row, p, query, scores_of, m, l, acc, read, bh, RING_SCORES, RING_VALUES, C
                    )
            if C.ENTRIES > 0:
                if split == 1:
                    m, l, acc, read = sink_part(
                        K_SINKS, V_SINKS, TABLE, row, p, query, scores_of, m, l, acc, read, bh, RING_SCORES,
                        RING_VALUES, C,
                    )  # fmt: skip
        else:
            lacking = m  # of keys around a mean
            if C.SMOOTH:
                d = tl.arange(0, C.DP)
                mean = tl.load(MEAN + bh * C.D + d, mask=d < C.D, other=0.0)
                lacking = tl.sum(query[1] * mean[:, None], 0)
            asked = query[0], query[1], query[2], query[3], query[4], lacking
            known = tl.full([C.Q], NOTHING, tl.float32)
            if C.SPARSE and C.ENTRIES > 0:
                at = bh.to(tl.int64) * C.ENTRIES
                s = sink_scores(
                    K_SINKS, TABLE, row, p, query, scores_of, at, at + token_order(SINK_TILE, 1), RING_SCORES, C
                )
                known = known_mass(s, scores_of[3], C)
            bounds = limits[0], limits[1], 1.0 / tl.cdiv(blocks, stretch)
            m, l, acc, lost, read, skipped = packed_by_width(
                K, V, dropped, MOVED, BLOCK_POS + b * NB, BLOCK_LEN + b * NB, row, p, asked, scores_of, bounds, known,
                m, l, acc, lost, read, skipped, begin, end, b, h, NB, K_LOCATE, V_LOCATE, SCORES, VALUES, STAGES, C,
            )  # fmt: skip
        acc = tl.where(query[5][None, :], float("nan"), acc)
        d, inside = CHANNELS(C), n < T * C.G
        at = (bh.to(tl.int64) * splits + split) * (T * C.G) + n
        tl.store(OUT + at[None, :] * C.D + d[:, None], acc, mask=inside[None, :] & (d < C.D)[:, None])
        tl.store(STATS + at * STAT, m, mask=inside)
        tl.store(STATS + at * STAT + 1, l, mask=inside)
        if C.SPARSE:
            tl.store(STATS + at * STAT + 2, lost, mask=inside)
            tl.atomic_add(SKIP_COUNTS.read + bh, tl.sum(tl.where(real, read, 0), 0).to(tl.int64))
            tl.atomic_add(SKIP_COUNTS.skipped + bh, tl.sum(tl.where(real, skipped, 0), 0).to(tl.int64))


@triton.jit
def merge_kernel(OUT, STATS, SKIP_COUNTS, ROWS, SINKS, RESULT, LSE, TABLE, DROPPED, NB, splits, T, plan,
                 CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Program (query, head, row): the parts of one query weighed by their log-sum-exp. Padding columns get zeros.
    `SINKS`: the model's learned logits; `TABLE`: of the sink pool.

    `RESULT` `[B, T, Hq, D]`, `LSE` fp32 `[B, Hq, T]`.
    """
    r, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = load_row(ROWS, b)
    if C.ENTRIES > 0:
        if r == 0:
            settle_sinks(TABLE, DROPPED, row, b * C.H + h, NB, C)
    t, head = r // C.G, h * C.G + r % C.G
    blocks = blocks_seen(row, NB, C)
    live = tl.cdiv(blocks, stretch_of(blocks, splits, plan, C)) + C.OPEN
    d = tl.arange(0, C.DP)
    base = (b * C.H + h).to(tl.int64) * splits * (T * C.G) + r
    m, l, lost = tl.full([], NOTHING, tl.float32), tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    acc = tl.full([C.DP], 0, tl.float32)
    STAT: tl.constexpr = 3 if C.SPARSE else 2
    if HAS_SINKS:
        m = tl.load(SINKS + head).to(tl.float32) * LOG2E
        l += 1.0
    for start in range(0, live, CHUNK):
        i = start + tl.arange(0, CHUNK)
        exists = i < live
        at = base + i.to(tl.int64) * (T * C.G)
        part_m = tl.load(STATS + at * STAT, mask=exists, other=NOTHING)
        part_l = tl.load(STATS + at * STAT + 1, mask=exists, other=0.0)
        part = tl.load(OUT + at[:, None] * C.D + d[None, :], mask=exists[:, None] & (d < C.D)[None, :], other=0.0)
        running = tl.maximum(m, tl.max(part_m, 0))
        w = tl.where(part_m > NOTHING, tl.exp2(part_m - running), 0.0)
        alpha = tl.exp2(m - running)
        acc = acc * alpha + tl.sum(part * w[:, None], 0)
        l = l * alpha + tl.sum(part_l * w, 0)
        if C.SPARSE:
            lost = lost * alpha + tl.sum(tl.load(STATS + at * STAT + 2, mask=exists, other=0.0) * w, 0)
        m = running
    first, count = row[4], row[5]
    if C.SPARSE:
        if t < count:
            share = lost / tl.where(l == 0.0, 1.0, l)
            tl.atomic_add(SKIP_COUNTS.queries + b * C.H + h, tl.full([], 1, tl.int64))
            tl.atomic_add(SKIP_COUNTS.dropped + b * C.H + h, share.to(tl.float64))
            tl.atomic_max(SKIP_COUNTS.worst + b * C.H + h, share)
    spare = t - count
    column = tl.where(t < count, first + t, tl.where(spare < first, spare, spare + count))
    result = tl.where(t < count, acc / tl.where(l == 0.0, 1.0, l), 0.0)
    lse = tl.where(t < count, m * LN2 + tl.log(l), 0.0)
    heads = C.H * C.G
    out = (b.to(tl.int64) * T + column) * heads + head
    tl.store(RESULT + out * C.D + d, result.to(RESULT.dtype.element_ty), mask=d < C.D)
    tl.store(LSE + (b.to(tl.int64) * heads + head) * T + column, lse)
