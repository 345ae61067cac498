"""Decode attention in Triton: split-KV, as in FlashDecoding.

The context of a row has three parts: packed blocks, the ring of open tokens, and the sink pool. It is divided into
splits. One program attends to one split with an online softmax (`parts.py`, `open_tokens.py`). A merge kernel then
combines the splits by their log-sum-exp. `ops/decode/reference.py` is the specification.

For the format `flashq` this is TurboAttention's Algorithm 2, with the key channel scale folded into the query and the
value channel scale into the accumulator.

Queries are columns of a tile, scores are in log2 units. Query `n` of a KV head belongs to token `n // G` and to query
head `n % G` of its GQA group.

`C` is a `launch.constants.Sizes` and `row` a `layout.Row`. `K` and `V` hold the tensors of one side of the layer, in
the form that its format's functions take (`formats.contract.JitFormat`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.jit.math import LN2, LOG2E, NOTHING
from qattn_kernels.jit.rotation import rotate_rows
from qattn_kernels.jit.rows import commit_row, first_bits, load_row, locate, queries_end, result_column, settle_sinks
from qattn_kernels.launch import constants
from qattn_kernels.layout import BlockState
from qattn_kernels.ops.decode.open_tokens import (
    SinkPool,
    last_sink,
    ring_part,
    sink_part,
    sink_scores,
    split_used,
)
from qattn_kernels.ops.decode.parts import (
    Blocks,
    Codec,
    HeadHome,
    Homes,
    Program,
    Scoring,
    SkipLimits,
    Skips,
    Sums,
    packed_part,
)
from qattn_kernels.ops.decode.queries import QuerySource, load_queries, query_tile
from qattn_kernels.ops.decode.table import Shares
from qattn_kernels.ops.decode.weights import known_mass

FEW_SPLITS = tl.constexpr(constants.FEW_SPLITS)


@triton.jit
def blocks_seen(row, NB, C: tl.constexpr):
    """Return the number of arena blocks that some query of the call reads, capped at the capacity `NB`."""
    if C.RING == 0:
        blocks = row.closed + tl.cdiv(row.length + row.count - row.open_start, C.BLOCK)
    elif C.ONE_TOKEN and C.SPAN == C.BLOCK and C.RESIDUAL == 0:
        blocks = row.closed  # this call still reads a block that it closes from the ring
    else:
        blocks = row.closed + row.closing
    return tl.minimum(blocks, NB)


@triton.jit
def blocks_per_split(blocks, splits, shares, C: tl.constexpr):
    """Return the packed blocks per split, a multiple of `C.TILE`, for a row of `blocks` blocks.

    `splits`: splits of the launch, including splits of open tokens. `shares`: the `table.Shares`. The result ignores
    the capacity, so that sums do not depend on it."""
    sharing = tl.minimum(tl.where(blocks < shares.few * shares.long, shares.few, shares.many), splits - C.OPEN)
    return tl.cdiv(tl.maximum(tl.cdiv(blocks, sharing), shares.least), C.TILE) * C.TILE


@triton.jit
def split_range(split, splits, row, NB, shares, C: tl.constexpr):
    """Return the block range of a split: `(blocks, per_split, begin, end, used)`.

    `blocks` is the number of packed blocks that some query reads, `per_split` the number per split. `used` tells
    whether the split can hold a token. The first `C.OPEN` splits read open tokens instead of blocks."""
    blocks = blocks_seen(row, NB, C)
    per_split = blocks_per_split(blocks, splits, shares, C)
    begin = (split - C.OPEN) * per_split
    end = tl.minimum(begin + per_split, blocks)
    used = (split < C.OPEN) | (begin < end)
    if C.RING_PARTS > 1:
        used = used & split_used(split, row, C)
    return blocks, per_split, begin, end, used


class Results(NamedTuple):
    """Partial results of all splits, and the counters of sparse V.

    Attributes:
        out: fp32 `[B * H, splits, T * G, D]`, sums of weighted values, not yet divided by the sum of the weights.
        stats: fp32 `[B * H, splits, T * G, 2]`, the largest score in log2 units, and the sum of the weights relative to
            it. Sparse V has a third entry, the dropped part of that sum.
        skip_counts: the `SkipCounts` of sparse V, or None.
    """

    out: Any
    stats: Any
    skip_counts: Any


@triton.jit
def _k_mean_scores(K_MEAN, program, C: tl.constexpr):
    """Return products fp32 `[Q]` of the queries with the row's mean key; zeros unless keys are smoothed."""
    SIDE: tl.constexpr = C.K
    if SIDE.SMOOTH:
        d = tl.arange(0, SIDE.DP)
        k_mean = tl.load(K_MEAN + program.bh * SIDE.D + d, mask=d < SIDE.D, other=0.0)
        return tl.sum(program.query.scaled * k_mean[:, None], 0)
    else:
        return tl.full([C.Q], 0.0, tl.float32)


@triton.jit
def _sink_mass(pool, program, codec, C: tl.constexpr):
    """Return the weight that sparse V knows before it reads a block: `known_mass` of the sink pool, `[Q]`.

    The result is fp32, in log2. Without a sink pool it is `NOTHING`, and `packed_part` uses the first block instead."""
    if C.SPARSE_V and C.ENTRIES > 0:
        return known_mass(sink_scores(pool, program, 0, codec, C), program.scoring.sas_threshold, C)
    else:
        return tl.full([C.Q], NOTHING, tl.float32)


@triton.jit
def store_split(results, bh, split, splits, n, T, real, nonfinite, sums, skips, C: tl.constexpr):
    """Store one split's `Sums` and `Skips` of queries `n` to `results`.

    `T`: tokens of the call. `real`: bool `[Q]`, columns with a token. Queries marked in `nonfinite` get NaN."""
    SIDE: tl.constexpr = C.V
    STAT: tl.constexpr = 3 if C.SPARSE_V else 2
    acc = tl.where(nonfinite[None, :], float("nan"), sums.acc)
    d, inside = tl.arange(0, SIDE.DP), n < T * C.G
    at = (bh.to(tl.int64) * splits + split) * (T * C.G) + n
    tl.store(results.out + at[None, :] * SIDE.D + d[:, None], acc, mask=inside[None, :] & (d < SIDE.D)[:, None])
    tl.store(results.stats + at * STAT, sums.m, mask=inside)
    tl.store(results.stats + at * STAT + 1, sums.l, mask=inside)
    if C.SPARSE_V:
        tl.store(results.stats + at * STAT + 2, skips.lost, mask=inside)
        tl.atomic_add(results.skip_counts.read + bh, tl.sum(tl.where(real, skips.read, 0), 0).to(tl.int64))
        tl.atomic_add(results.skip_counts.skipped + bh, tl.sum(tl.where(real, skips.skipped, 0), 0).to(tl.int64))


@triton.jit(do_not_specialize=["NB", "B", "T", "few", "many", "long", "least"])
def decode_kernel(QUERIES, ROWS, LAYER, RESULTS, NB, B, T, scoring, skip_limits, few, many, long, least, CODEC,
                  STAGES: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Attend to one split for up to `Q` queries. One program per (row and KV head, tile of queries, split).

    The first `C.RING_PARTS` splits read the ring, the next one the sink pool if there is one. They start first because
    they can take longest. The others share a row's blocks evenly (`blocks_per_split`); those that a short row does not
    need end at once. The last split has the least to do, so it commits the new lengths to `LAYER`.

    Programs read `ROWS`, which keeps each row as it was before the call. The mask bits cover masked tokens, and tokens
    that were in the sink pool before the call.

    Args:
        QUERIES, RESULTS, scoring, CODEC: fields of a `QuerySource`, `Results`, `Scoring` and `Codec`.
        ROWS: int32 `[B, ROW_FIELDS]`, each `Row` before the call.
        LAYER: the `launch.call.LayerTensors`. NB, B, T: capacity of a row in blocks, rows, tokens of the call.
        skip_limits: tau and budget of sparse V. few, many, long, least: the `table.Shares`. STAGES: loads in flight.
    """
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    bh, tile, split, splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    b, h = bh // C.H, bh % C.H
    row, K, V, PAGES = load_row(ROWS, b), LAYER.k, LAYER.v, LAYER.pages
    # Load head addresses, sinks and a step's queries while the row itself is loading: none depends on the row.
    _, k_head, k_low = locate(K, b, h, Codec(*CODEC).k_locate, K_SIDE, C)
    _, v_head, v_low = locate(V, b, h, Codec(*CODEC).v_locate, V_SIDE, C)
    sinks, state, results = LAYER.sinks, BlockState(*LAYER.blocks), Results(*RESULTS)
    pool = SinkPool(sinks.k, sinks.v, sinks.table, last_sink(sinks.table, bh, split == C.OPEN - 1, C))
    n = tile * C.Q + tl.arange(0, C.Q)
    t = n // C.G
    real = t < row.count
    q = load_queries(QuerySource(*QUERIES), b, h, n, t, row, T, C)
    q_pos = tl.where(t < queries_end(row, T, C), row.length + t, -1)
    blocks, per_split, begin, end, used = split_range(split, splits, row, NB, Shares(few, many, long, least), C)
    if (split == splits - 1) & (tile == 0) & (h == 0):
        commit_row(ROWS, LAYER, row, b, B, T, C)
    if used:
        scores = Scoring(*scoring)
        query, nonfinite = query_tile(q, scores.scale, C)
        sums = Sums(
            tl.full([C.Q], NOTHING, tl.float32), tl.full([C.Q], 0, tl.float32), tl.full([V_SIDE.DP, C.Q], 0, tl.float32)
        )
        skips = Skips(tl.full([C.Q], 0, tl.float32), tl.full([C.Q], 0, tl.int32), tl.full([C.Q], 0, tl.int32))
        program = Program(b, h, bh, row, NB, PAGES, first_bits(state.dropped, PAGES, b, h, NB, C), q_pos, query, scores)
        if split < C.OPEN:
            if C.RING > 0:
                if (split == 0) if C.RING_PARTS == 1 else (split < C.RING_PARTS):  # the first takes fewer registers
                    sums, skips = ring_part(K, V, program, split, sums, skips, Codec(*CODEC), C)
            if C.ENTRIES > 0:
                if split == C.RING_PARTS:
                    sums, skips = sink_part(pool, program, sums, skips, Codec(*CODEC), C)
        else:
            limits = SkipLimits(skip_limits[0], skip_limits[1], 1.0 / tl.cdiv(blocks, per_split))
            k_mean_scores = _k_mean_scores(LAYER.k_mean, program, C)
            known = _sink_mass(pool, program, Codec(*CODEC), C)
            rows = 0 if C.PAGED else b * NB
            pos, length = state.block_pos + rows, state.block_len + rows
            packed = Blocks(begin, end, pos, length, sinks.moved, k_mean_scores, limits, known)
            homes = Homes(HeadHome(k_head, k_low), HeadHome(v_head, v_low))
            sums, skips = packed_part(K, V, program, packed, homes, sums, skips, Codec(*CODEC), STAGES, C)
        store_split(results, bh, split, splits, n, T, real, nonfinite, sums, skips, C)


class Parts(NamedTuple):
    """Partial results of one query, from `[n]` splits or merged.

    Attributes:
        m: maxima of the scores, in log2 units.
        l: sums of weights.
        lost: the part of `l` that sparse V dropped.
        acc: sums of weighted values, `[n, DP]`.
    """

    m: Any
    l: Any
    lost: Any
    acc: Any


@triton.jit
def load_parts(results, base, i, end, T, C: tl.constexpr):
    """Load the `Parts` that `store_split` wrote for splits `i`, as far as `i < end`."""
    SIDE: tl.constexpr = C.V
    STAT: tl.constexpr = 3 if C.SPARSE_V else 2
    d, there = tl.arange(0, SIDE.DP), i < end
    at = base + i.to(tl.int64) * (T * C.G)
    m = tl.load(results.stats + at * STAT, mask=there, other=NOTHING)
    l = tl.load(results.stats + at * STAT + 1, mask=there, other=0.0)
    lost = tl.load(results.stats + at * STAT + 2, mask=there, other=0.0) if C.SPARSE_V else l
    acc = tl.load(
        results.out + at[:, None] * SIDE.D + d[None, :], mask=there[:, None] & (d < SIDE.D)[None, :], other=0.0
    )
    return Parts(m, l, lost, acc)


@triton.jit
def _join(merged, parts, i, live, row, C: tl.constexpr):
    """Return `merged` combined with the `parts` of splits `i`, as far as `i < live`, by their log-sum-exp."""
    exists = i < live
    if C.RING_PARTS > 1:
        exists = exists & split_used(i, row, C)
    m = tl.where(exists, parts.m, NOTHING)
    running = tl.maximum(merged.m, tl.max(m, 0))
    w = tl.where(m > NOTHING, tl.exp2(m - running), 0.0)
    alpha = tl.exp2(merged.m - running)
    l = merged.l * alpha + tl.sum(tl.where(exists, parts.l, 0.0) * w, 0)
    lost = merged.lost
    if C.SPARSE_V:
        lost = lost * alpha + tl.sum(tl.where(exists, parts.lost, 0.0) * w, 0)
    acc = merged.acc * alpha + tl.sum(tl.where(exists[:, None], parts.acc, 0.0) * w[:, None], 0)
    return Parts(running, l, lost, acc)


@triton.jit(do_not_specialize=["NB", "splits", "T", "few", "many", "long", "least"])
def merge_kernel(RESULTS, ROWS, LAYER, SINKS, RESULT, LSE, NB, splits, T, few, many, long, least, CHUNK: tl.constexpr,
                 SINK_LOGITS: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Merge the splits of one query by their log-sum-exp. One program per (query, head, row).

    Columns without a query get zeros. Every split has read the old mask bits by now, so this kernel also updates the
    bits of the sink pool.

    Args:
        RESULTS: fields of a `Results`.
        SINKS: the model's learned sink logits, `[Hq]`. They add to the softmax denominator and have no token.
        RESULT: output `[B, T, Hq, D]`. LSE: output fp32 `[B, Hq, T]`. CHUNK: splits loaded at once.
    """
    SIDE: tl.constexpr = C.V
    r, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, results = load_row(ROWS, b), Results(*RESULTS)
    base = (b * C.H + h).to(tl.int64) * splits * (T * C.G) + r
    # Load the first splits before the row says how many splits exist. Short contexts have few splits, and joining a
    # large tile would take longer than loading it.
    few_parts = load_parts(results, base, tl.arange(0, FEW_SPLITS), splits, T, C)
    first_parts = load_parts(results, base, tl.arange(0, CHUNK), splits, T, C)
    t, head = r // C.G, h * C.G + r % C.G
    blocks = blocks_seen(row, NB, C)
    live = tl.cdiv(blocks, blocks_per_split(blocks, splits, Shares(few, many, long, least), C)) + C.OPEN
    merged = Parts(
        tl.full([], NOTHING, tl.float32), tl.full([], 0, tl.float32), tl.full([], 0, tl.float32),
        tl.full([SIDE.DP], 0, tl.float32),
    )  # fmt: skip
    if SINK_LOGITS:
        logit = tl.load(SINKS + head).to(tl.float32) * LOG2E
        merged = Parts(logit, merged.l + 1.0, merged.lost, merged.acc)
    if live <= FEW_SPLITS:
        merged = _join(merged, few_parts, tl.arange(0, FEW_SPLITS), live, row, C)
    else:
        merged = _join(merged, first_parts, tl.arange(0, CHUNK), live, row, C)
    for start in range(CHUNK, live, CHUNK):
        i = start + tl.arange(0, CHUNK)
        merged = _join(merged, load_parts(results, base, i, live, T, C), i, live, row, C)
    m, l, lost, acc = merged
    if C.SPARSE_V:
        if t < row.count:
            share = lost / tl.where(l == 0.0, 1.0, l)
            tl.atomic_add(results.skip_counts.queries + b * C.H + h, tl.full([], 1, tl.int64))
            tl.atomic_add(results.skip_counts.dropped + b * C.H + h, share.to(tl.float64))
            tl.atomic_max(results.skip_counts.worst + b * C.H + h, share)
    column, query = result_column(t, row, T), t < queries_end(row, T, C)
    result = tl.where(query, acc / tl.where(l == 0.0, 1.0, l), 0.0)
    if SIDE.ROTATION is not None:
        R: tl.constexpr = SIDE.ROTATION
        result = tl.reshape(
            rotate_rows(result.to(RESULT.dtype.element_ty).to(tl.float32)[None, :], None, True, R), [SIDE.DP]
        )
    lse = tl.where(query, m * LN2 + tl.log(l), 0.0)
    heads = C.H * C.G
    out, d = (b.to(tl.int64) * T + column) * heads + head, tl.arange(0, SIDE.DP)
    tl.store(RESULT + out * SIDE.D + d, result.to(RESULT.dtype.element_ty), mask=d < SIDE.D)
    tl.store(LSE + (b.to(tl.int64) * heads + head) * T + column, lse)
    if C.ENTRIES > 0:
        if r == 0:
            settle_sinks(LAYER, row, b, h, NB, C)
