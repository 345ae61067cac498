"""Prefill attention over unpacked keys and values in Triton, in one pass with an fp32 softmax.

Products are INT8, FP8 or bf16/fp16/fp32. Optimizations in addition to the quantized products:

- The logarithm of a value's scale is added to the value's score. `exp2` then yields weight times scale, ready for
  rounding, and a multiply-add removes the scale from the row sum.
- An int32 sum becomes a float without the conversion unit. The product starts from the bits of 1.5 * 2^23, so its
  result read as a float is `ROUNDER + sum`. The multiply-add that scales it also subtracts `ROUNDER * scale`. The error
  is at most one unit of a sum of thousands.
- Keys of a tile are loaded in the order in which the second product needs their weights in registers.

A program reads its slots in up to three loops: slots at the edge of a local window, slots that every query sees, where
no positions are compared, and the rest. Padding after a row's tokens gets separate programs, so that it shares no scale
with tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.granularity import QUERY_BLOCK
from qattn_kernels.jit.math import LN2, LOG2E, NOTHING, ROUNDER, float_to_int8, largest
from qattn_kernels.jit.rows import in_window, load_row, result_column
from qattn_kernels.ops.prefill.products import (
    PART,
    add_values,
    channels,
    key_order,
    load_keys,
    load_values,
    product,
    products,
)
from qattn_kernels.ops.prefill.weights import (
    LARGEST,
    LEVELS,
    NEGATIVE,
    block_weights,
    factor,
    group_weights,
    row_weights,
    token_scores,
    token_weights,
)

MEAN_QUERIES = tl.constexpr(QUERY_BLOCK)
LEAST_UNIT = tl.constexpr(1e-36)  # unit of an all-zero query; its inverse is finite


class HeadKV(NamedTuple):
    """Pointers to the unpacked keys and values of a row and KV head, each at its first slot.

    Attributes:
        k, k_scale, v: as in `launch.unpacked_kv.UnpackedKV`.
        bias: `v_log_scale` of `value_factors.Factors`. The plain bias if scores stay in the unit of their query
            (`BY_ROW`), or if values have no scales.
        v_factor: `inverse` of `value_factors.Factors`. The values' scales with `BY_ROW`; the bias, unused, if values
            have no scales.
        pos: row positions.
        shift: scores of the mean query, if queries are smoothed.
    """

    k: Any
    k_scale: Any
    v: Any
    bias: Any
    v_factor: Any
    pos: Any
    shift: Any


class Queries(NamedTuple):
    """The queries of a program.

    Attributes:
        x: `[BM, DP]`, first operand of the product.
        unit: value of one unit of the products with keys (see `_queries`).
        pos: int32 `[BM]`, row positions.
        k_mean_scores: fp32 `[BM]`, products with the keys' mean.
    """

    x: Any
    unit: Any
    pos: Any
    k_mean_scores: Any


class Columns(NamedTuple):
    """The columns of a program's queries, `[BM]`.

    Attributes:
        to: column of the call that each result goes to.
        inside: whether the program writes the column.
        real: whether the column has a query.
    """

    to: Any
    inside: Any
    real: Any


class Sums(NamedTuple):
    """Running state of the online softmax.

    Attributes:
        acc: sums of weighted values, fp32 `[BM, channels]` for each `PART` of the channels.
        l: fp32 `[BM]`, sum of the weights.
        m: fp32 `[BM]`, largest score so far, including its value's scale.
        peak: fp32 `[BM]`, largest score so far without that scale; SAS cuts against it.
    """

    acc: Any
    l: Any
    m: Any
    peak: Any


@triton.jit
def _visible(pos, q_pos, n, C: tl.constexpr):
    """Return bool `[BM, BN]`: which slots `n` the queries at row positions `q_pos` see."""
    there = tl.load(pos + n)[None, :]
    see = there <= q_pos[:, None]
    if C.LOCAL_WINDOW:
        see &= in_window(there, q_pos[:, None], C.LOCAL_WINDOW, C.CHUNKS)
    return see


@triton.jit
def _tile(queries, sums, head, n0, N, cap, threshold, BN: tl.constexpr, BLOCKS: tl.constexpr, MASK: tl.constexpr,
          C: tl.constexpr):  # fmt: skip
    """Add slots from `n0` on to `sums`: one step of the online softmax.

    `MASK`: compare row positions. `BLOCKS`: read scales per block; no slot is masked."""
    q, unit = queries.x, queries.unit
    i = tl.arange(0, BN)
    order = key_order(i, C.V_INT8 or C.V_FP8)
    keys = load_keys(head.k, n0, order, C)
    x = products(q, keys) if C.K_INT8 else product(q, keys, C)
    if BLOCKS and C.V_FP8:
        p, mass, here, new, peak = group_weights(x, unit, sums, head, n0, BN, C)
    elif BLOCKS:
        p, mass, here, new, peak = block_weights(x, unit, sums, head, n0, threshold, BN, C)
    elif C.BY_ROW:
        see = _visible(head.pos, queries.pos, n0 + order, C) if MASK else True
        p, mass, here, new, peak = row_weights(x, unit, sums, head, n0, order, see, BN, MASK, C)
    else:
        one = unit
        if C.K_INT8 and C.Q_GROUP != "block":
            x, one = (x - ROUNDER) * unit[:, None], 1.0
        s, r = token_scores(x, one, head, n0 + order, cap, queries.k_mean_scores, C)
        if MASK:
            s = tl.where(_visible(head.pos, queries.pos, n0 + order, C), s, NEGATIVE)
        p, mass, here, new, peak = token_weights(s, r, sums, threshold, C)
    alpha = tl.exp2(sums.m - new)
    acc = ()
    for part in tl.static_range(triton.cdiv(C.DVP, PART)):
        values = load_values(head.v, n0, i, N, part, C)
        acc += (add_values(sums.acc[part], p, values, alpha, here - new, C),)
    if C.V_INT8:
        mass *= tl.exp2(here - new)
    return Sums(acc, sums.l * alpha + mass, new, peak)


@triton.jit
def _queries(q, stride, column, real, inside, lse, scale, cap, k_mean, q_mean, C: tl.constexpr):
    """Return `(x, unit, k_mean_scores)` of a `Queries`.

    `unit` is in log2, or in the exponent of the cap; one for all queries, or `[BM]`. `k_mean_scores` is in the same
    unit. Non-finite queries do not affect shared scales. This function stores NaN for them in `lse`, and 0 for finite
    queries; `_finish` reads it back, which saves registers."""
    d = tl.arange(0, C.DP)
    q += column.to(tl.int64)[:, None] * stride + d[None, :]
    there = (d < C.D)[None, :]
    x = tl.load(q, mask=real[:, None] & there, other=0)
    unit, k_mean_scores = scale, tl.full([C.BM], 0.0, tl.float32)
    to_log2 = factor(cap, C)
    if C.SMOOTH_K:
        mean = tl.load(k_mean + d, mask=d < C.D, other=0.0)
        k_mean_scores = tl.sum(x.to(tl.float32) * mean[None, :], 1) * (scale * to_log2)
    # NaN where a number is not finite, else 0. INT8 queries derive it from the maximum that their scale needs anyway.
    # Comparing all numbers takes more integer instructions. ptxas then moves registers by multiplication, in the main
    # loop as well, which makes an INT8 prefill 5 % slower on an H200.
    if not C.K_INT8:
        tl.store(lse, tl.sum(x.to(tl.float32) * 0.0, 1), mask=inside)
    else:
        x = x.to(tl.float32)
        if C.SMOOTH_Q != "none":
            x -= tl.where(real[:, None], tl.load(q_mean + d, mask=d < C.D, other=0.0)[None, :], 0.0)
        top = largest(x) * tl.abs(scale)
        mark = top * 0.0
        tl.store(lse, mark, mask=inside)
        top = tl.where(mark == 0.0, top, 0.0)
        if C.Q_GROUP == "block":
            top = tl.max(top, 0) + tl.zeros_like(top) if C.BY_ROW else tl.max(top, 0)
        elif C.Q_GROUP == "thread":
            most = tl.max(tl.reshape(top, (C.BM // 32, 4, 8)), 1)
            top = tl.reshape(tl.broadcast_to(most[:, None, :], (C.BM // 32, 4, 8)), (C.BM,))
        unit = top / C.Q_LEVELS
        unit = tl.where(unit < LEAST_UNIT, LEAST_UNIT, unit)
        inverse = 1.0 / unit
        by = scale * inverse
        x = float_to_int8(x * (by if C.Q_GROUP == "block" and not C.BY_ROW else by[:, None]))
    return x, unit * to_log2, k_mean_scores


@triton.jit
def _reach(q_pos, C: tl.constexpr):
    """Return how many positions back a query at `q_pos` sees: to the start of its window or chunk."""
    if C.CHUNKS:
        return q_pos % C.LOCAL_WINDOW
    else:
        return C.LOCAL_WINDOW - 1


@triton.jit
def _window_start(pos, slot, q_pos, C: tl.constexpr):
    """Return the first slot of the tile with the oldest token that the query at `q_pos`, in `slot`, sees.

    Two slots are at least as far apart as their positions. The tile therefore starts `_reach` slots back, or earlier
    after crops."""
    BN: tl.constexpr = C.BN
    reach = _reach(q_pos, C)
    start = tl.maximum(slot - reach, 0) // BN * BN
    while (start > 0) & (tl.load(pos + start) > q_pos - reach):
        start -= BN
    return start


@triton.jit
def _no_sums(C: tl.constexpr):
    """Return the `Sums` of no slots."""
    nothing, acc = tl.full([C.BM], NOTHING, tl.float32), ()
    for _ in tl.static_range(triton.cdiv(C.DVP, PART)):
        acc += (tl.full([C.BM, min(C.DVP, PART)], 0.0, tl.float32),)
    return Sums(acc, tl.full([C.BM], 0.0, tl.float32), nothing, nothing)


@triton.jit(do_not_specialize=["T"])
def attend(QUERIES, KV, clean, rows, sinks, extra, out, lse, T, N, scoring, C: tl.constexpr):
    """Attend with up to `BM` queries of one query head. One program per (row, query head, block of queries).

    `QUERIES`: queries and strides. `KV`: a `HeadKV` of all heads, without `shift`. `scoring`: scale, cap in log2, SAS
    threshold. `extra`: `k_mean`, `q_mean`, `shift`, `v_channel`, `v_mean` of the `UnpackedKV`, or placeholders."""
    q, q_strides = QUERIES
    k, k_scale, v, bias, v_factor, pos = KV
    scale, cap, threshold = scoring
    blocks = tl.cdiv(T, C.BM) + 1
    pid = tl.program_id(0)
    group = pid // C.G
    bh = group // blocks
    b, h = bh // (C.HQ // C.G), bh % (C.HQ // C.G) * C.G + pid % C.G
    row = load_row(rows, b)
    block = blocks - 1 - group % blocks
    t0, until = block * C.BM, row.count
    if t0 >= row.count:  # padding starts a new block, so that it shares no scale with tokens
        t0, until = row.count + (block - tl.cdiv(row.count, C.BM)) * C.BM, T
    t, stop = t0 + tl.arange(0, C.BM), tl.minimum(t0 + C.BM, tl.minimum(until, T - row.first))
    inside, real = t < until, t < stop
    to = result_column(t, row, T)
    k_mean, q_mean, shift, v_channel, v_mean = extra
    if C.SMOOTH_Q != "none":
        part = (b * C.HQ + h).to(tl.int64)
        if C.SMOOTH_Q == "block":
            # padding uses the mean of the last token
            part = part * tl.cdiv(T, MEAN_QUERIES) + tl.maximum(tl.minimum(t0, row.count - 1), 0) // MEAN_QUERIES
        q_mean, shift = q_mean + part * C.D, shift + part * N
    q = q + b.to(tl.int64) * q_strides[0] + h.to(tl.int64) * q_strides[1]
    lse = lse + (b * C.HQ + h).to(tl.int64) * T + to
    x, unit, k_mean_scores = _queries(q, q_strides[2], to, real, inside, lse, scale, cap, k_mean + bh * C.D, q_mean, C)
    base = bh.to(tl.int64) * N
    head = HeadKV(k + base * C.D, k_scale + base, v + base * C.DV, bias + base, v_factor + base,
                  pos + b.to(tl.int64) * N, shift)  # fmt: skip
    slot = row.closed * C.BLOCK + row.length - row.open_start
    end = tl.where(t0 < stop, slot + tl.minimum(stop, row.count), 0)
    plain = tl.minimum(slot + t0 + 1, end)  # every query sees all slots below
    if C.BLOCK_SCALES:
        plain = tl.minimum(plain, tl.load(clean + bh))
        if not C.V_FP8:
            plain = tl.minimum(plain, (row.closed + row.closing) * C.BLOCK)
    start, main = 0, 0
    if C.LOCAL_WINDOW:
        start = _window_start(head.pos, slot + tl.minimum(t0, row.count - 1), row.length + t0, C)
        main = tl.maximum(tl.cdiv(slot + stop - 1 - _reach(row.length + stop - 1, C), C.BN) * C.BN, start)
    plain = tl.maximum(plain // C.BN * C.BN, main)
    sums = _no_sums(C)
    if C.LOCAL_WINDOW:
        for n0 in tl.range(start, tl.minimum(main, end), C.TAIL, num_stages=C.STAGES):
            sums = _tile(Queries(x, unit, row.length + t, k_mean_scores), sums, head, n0, N, cap, threshold,
                         C.TAIL, False, True, C)  # fmt: skip
    for n0 in tl.range(main, plain, C.BN, num_stages=C.STAGES):
        sums = _tile(Queries(x, unit, row.length + t, k_mean_scores), sums, head, n0, N, cap, threshold,
                     C.BN, C.BLOCK_SCALES, False, C)  # fmt: skip
    for n0 in tl.range(plain, end, C.TAIL, num_stages=C.STAGES):
        sums = _tile(Queries(x, unit, row.length + t, k_mean_scores), sums, head, n0, N, cap, threshold,
                     C.TAIL, False, True, C)  # fmt: skip
    columns = Columns(to, inside, real)
    _finish(sums, k_mean_scores, sinks, v_channel + bh * C.DV, v_mean + bh * C.DV, out, lse, b, h, columns, T, C)


@triton.jit
def _finish(sums, k_mean_scores, sinks, v_channel, v_mean, out, lse, b, h, columns, T, C: tl.constexpr):
    """Normalise and write the outputs, and their log-sum-exp to `lse` `[BM]`.

    Outputs are zeros for columns without a query and for queries that see nothing; `lse` is 0 and -inf there. Where
    `lse` holds NaN on entry, outputs are NaN and `lse` ends with an arbitrary number."""
    tl.debug_barrier()
    to, inside, real = columns
    mark = tl.load(lse, mask=inside, other=0.0)
    acc, total, top, _ = sums
    WHOLE: tl.constexpr = LEVELS if C.V_INT8 else (LARGEST if C.V_FP8 else 1.0)  # value of a weight of 1
    if C.SMOOTH_K and not C.SOFTCAP:
        top += k_mean_scores
    if C.SINK_LOGITS:
        sink = tl.load(sinks + h).to(tl.float32) * LOG2E
        new = tl.maximum(top, sink)
        fade = tl.exp2(top - new)
        total, top = total * fade, new
        total += tl.exp2(sink - new) * WHOLE
    some = real & (total > 0.0)
    weight = tl.where(some, 1.0 / tl.where(some, total, 1.0), 0.0) + mark
    sums = top * LN2 + tl.log(tl.where(some, total, 1.0) / WHOLE)
    sums = tl.where(some, sums, tl.where(real, NEGATIVE, 0.0))
    tl.store(lse, sums, mask=inside)
    for part in tl.static_range(triton.cdiv(C.DVP, PART)):
        x, d = acc[part], channels(part, C)
        if C.SINK_LOGITS:
            x *= fade[:, None]
        x *= weight[:, None]
        if C.V_FP8:
            x *= tl.load(v_channel + d, mask=d < C.DV, other=0.0)[None, :]
            if C.SMOOTH_V:
                x = tl.where(some[:, None], x + tl.load(v_mean + d, mask=d < C.DV, other=0.0)[None, :], x)
        where = ((b.to(tl.int64) * T + to)[:, None] * C.HQ + h) * C.DV + d[None, :]
        tl.store(out + where, x.to(out.dtype.element_ty), mask=inside[:, None] & (d < C.DV)[None, :])
