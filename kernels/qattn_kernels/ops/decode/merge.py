"""Merge the splits of a decode by their log-sum-exp."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.jit.dependent import await_previous_kernel
from qattn_kernels.jit.math import LN2, LOG2E, NOTHING
from qattn_kernels.jit.rotation import rotate_rows
from qattn_kernels.jit.rows import commit_rows, load_row, queries_end, result_column, settle_sinks
from qattn_kernels.ops.decode.open_tokens import split_used
from qattn_kernels.ops.decode.splits import Results, blocks_seen, cut_blocks, number_of_splits, read_rule


class Output(NamedTuple):
    """Where the merge stores the results of a call, and the learned sinks that it adds.

    Attributes:
        out: `[B, T, Hq, D]` in the model's dtype.
        lse: fp32 `[B, Hq, T]`, log-sum-exp.
        sink_logits: the model's learned sink logits `[Hq]`, or None. They add to the softmax denominator and have no
            token.
    """

    out: Any
    lse: Any
    sink_logits: Any


class Parts(NamedTuple):
    """Partial results of queries `[M]`: of splits `[S]`, or merged, then without the first dimension.

    Attributes:
        m: `[S, M]`, maxima of the scores, in log2 units.
        l: `[S, M]`, sums of weights.
        lost: `[S, M]`, the part of `l` that sparse V dropped.
        acc: `[S, M, CHANNELS]`, sums of weighted values.
    """

    m: Any
    l: Any
    lost: Any
    acc: Any


@triton.jit
def _load_parts(results, base, i, n, d, end, T, C: tl.constexpr):
    """Load the `Parts` that `store_split` wrote for splits `i`, queries `n` and channels `d`, as far as `i < end`.

    `base`: index of the head's first split, query 0."""
    SIDE: tl.constexpr = C.V
    STAT: tl.constexpr = 3 if C.SPARSE_V else 2
    there = (i < end)[:, None] & (n < T * C.G)[None, :]
    at = base + i.to(tl.int64)[:, None] * (T * C.G) + n[None, :]
    m = tl.load(results.stats + at * STAT, mask=there, other=NOTHING)
    l = tl.load(results.stats + at * STAT + 1, mask=there, other=0.0)
    lost = tl.load(results.stats + at * STAT + 2, mask=there, other=0.0) if C.SPARSE_V else l
    inside = there[:, :, None] & (d < SIDE.D)[None, None, :]
    acc = tl.load(results.out + at[:, :, None] * SIDE.D + d[None, None, :], mask=inside, other=0.0)
    return Parts(m, l, lost, acc)


@triton.jit
def _join(merged, parts, i, live, row, C: tl.constexpr):
    """Return `merged` combined with the `parts` of splits `i`, as far as `i < live`, by their log-sum-exp."""
    exists = i < live
    if C.RING_PARTS > 1:
        exists = exists & split_used(i, row, C)
    m = tl.where(exists[:, None], parts.m, NOTHING)
    running = tl.maximum(merged.m, tl.max(m, 0))
    w = tl.where(m > NOTHING, tl.exp2(m - running[None, :]), 0.0)
    alpha = tl.exp2(merged.m - running)
    l = merged.l * alpha + tl.sum(tl.where(exists[:, None], parts.l, 0.0) * w, 0)
    lost = merged.lost
    if C.SPARSE_V:
        lost = lost * alpha + tl.sum(tl.where(exists[:, None], parts.lost, 0.0) * w, 0)
    acc = tl.where(exists[:, None, None], parts.acc, 0.0) * w[:, :, None]
    return Parts(running, l, lost, merged.acc * alpha[:, None] + tl.sum(acc, 0))


@triton.jit
def _no_parts(output, h, n, M: tl.constexpr, CHANNELS: tl.constexpr, C: tl.constexpr):
    """Return the merged `Parts` of no split; learned sink logits are in them."""
    m, zero = tl.full([M], NOTHING, tl.float32), tl.full([M], 0, tl.float32)
    acc = tl.full([M, CHANNELS], 0, tl.float32)
    if output.sink_logits is not None:
        m = tl.load(output.sink_logits + h * C.G + n % C.G).to(tl.float32) * LOG2E
        return Parts(m, zero + 1.0, zero, acc)
    else:
        return Parts(m, zero, zero, acc)


@triton.jit
def _count_skips(counts, merged, counted, bh):
    """Add what sparse V dropped of the queries where `counted` `[M]` is true to the `SkipCounts`."""
    share = merged.lost / tl.where(merged.l == 0.0, 1.0, merged.l)
    at = bh + tl.full(share.shape, 0, tl.int32)
    tl.atomic_add(counts.queries + at, counted.to(tl.int64), mask=counted)
    tl.atomic_add(counts.dropped + at, share.to(tl.float64), mask=counted)
    tl.atomic_max(counts.worst + at, share, mask=counted)


@triton.jit
def store_output(output, merged, skip_counts, row, b, h, n, d, T, C: tl.constexpr):
    """Store the results of queries `n` `[M]` and channels `d` from their merged `Parts`.

    Columns without a query get zeros."""
    SIDE: tl.constexpr = C.V
    t, inside = n // C.G, n < T * C.G
    DTYPE: tl.constexpr = output.out.dtype.element_ty
    if C.SPARSE_V:
        _count_skips(skip_counts, merged, inside & (t < row.count) & (tl.min(d, 0) == 0), b * C.H + h)
    column, query = result_column(t, row, T), t < queries_end(row, T, C)
    result = tl.where(query[:, None], merged.acc / tl.where(merged.l == 0.0, 1.0, merged.l)[:, None], 0.0)
    if SIDE.ROTATION is not None:
        R: tl.constexpr = SIDE.ROTATION
        result = rotate_rows(result.to(DTYPE).to(tl.float32), None, True, R)
    lse = tl.where(query, merged.m * LN2 + tl.log(merged.l), 0.0)
    heads, head = C.H * C.G, h * C.G + n % C.G
    at = (b.to(tl.int64) * T + column) * heads + head
    wanted = inside[:, None] & (d < SIDE.D)[None, :]
    tl.store(output.out + at[:, None] * SIDE.D + d[None, :], result.to(DTYPE), mask=wanted)
    tl.store(output.lse + (b.to(tl.int64) * heads + head) * T + column, lse, mask=inside & (tl.min(d, 0) == 0))


@triton.jit(do_not_specialize=["NB", "splits", "T"])
def merge_kernel(RESULTS, ROWS, OUTPUT, NB, splits, T, SHARES, LAYER, FEW: tl.constexpr, CHUNK: tl.constexpr,
                 QUERIES: tl.constexpr, CHANNELS: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Merge the splits of `QUERIES` queries and `CHANNELS` channels. One program per (tile of both, head, row).

    Every split has read the old mask bits by now, so this kernel also updates the bits of the sink pool. A program of
    one row more commits all lengths to `LAYER`, so that none waits for it.

    Args:
        RESULTS, OUTPUT: fields of a `Results` and of an `Output`.
        splits: splits of the launch that stored the results. SHARES: from `table.encoded`.
        CHUNK: splits loaded at once, at least `FEW`.
    """
    SIDE: tl.constexpr = C.V
    PIECES: tl.constexpr = SIDE.DP // CHANNELS
    await_previous_kernel(C.DEPENDENT)
    tile, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if b == tl.num_programs(2) - 1:
        if (tile == 0) & (h == 0):
            commit_rows(ROWS, LAYER, b, T, C)
        return
    row, results, output = load_row(ROWS, b), Results(*RESULTS), Output(*OUTPUT)
    n = tile // PIECES * QUERIES + tl.arange(0, QUERIES)
    d = tile % PIECES * CHANNELS + tl.arange(0, CHANNELS)
    base = (b * C.H + h).to(tl.int64) * splits * (T * C.G)
    # Load the first splits before the row says how many splits exist. Short contexts have few splits, and joining a
    # large tile would take longer than loading it.
    few_parts = _load_parts(results, base, tl.arange(0, FEW), n, d, splits, T, C)
    first_parts = few_parts
    if CHUNK > FEW:
        first_parts = _load_parts(results, base, tl.arange(0, CHUNK), n, d, splits, T, C)
    rule = read_rule(SHARES)
    live = number_of_splits(cut_blocks(blocks_seen(row, NB, C), rule, C)) + rule.open
    merged = _no_parts(output, h, n, QUERIES, CHANNELS, C)
    if live <= FEW:
        merged = _join(merged, few_parts, tl.arange(0, FEW), live, row, C)
    else:
        merged = _join(merged, first_parts, tl.arange(0, CHUNK), live, row, C)
    for start in range(CHUNK, live, CHUNK):
        i = start + tl.arange(0, CHUNK)
        merged = _join(merged, _load_parts(results, base, i, n, d, live, T, C), i, live, row, C)
    store_output(output, merged, results.skip_counts, row, b, h, n, d, T, C)
    if C.ENTRIES > 0:
        if tile == 0:
            settle_sinks(LAYER, row, b, h, NB, C)
