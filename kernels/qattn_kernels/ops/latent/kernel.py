"""Latent attention (MLA) in Triton: a decode over packed blocks and the ring, split-KV as in `ops/decode/kernel.py`, and
a prefill over unpacked keys and values; `ops/decode/reference.py` and `ops/prefill/reference.py` are the specification.

All query heads share the one latent of a token, which is in both products, so a program dequantizes a tile of latents
once, for up to 64 queries. Codes are exact in fp16 and enter the products as they are: the scale of a token goes into
its score and, as a share of the largest so far, into its weight. What has no codes is multiplied in the model's dtype.
Queries are columns, scores are in log2 units. `V` are the latents and `K` the RoPE parts, `C` a `Sizes` of the RoPE
part, and `C.V` the same of the latent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.int8.jit import channels
from qattn_kernels.jit.math import LN2, LOG2E, NOTHING, TINY, broken
from qattn_kernels.jit.rows import commit_row, load_row
from qattn_kernels.jit.tokens import from_ring
from qattn_kernels.launch.unpacked_kv import UnpackedTensors
from qattn_kernels.ops.decode.kernel import blocks_per_split, blocks_seen, store_split
from qattn_kernels.ops.decode.parts import (
    RING_TILE,
    Blocks,
    Program,
    Scoring,
    Sums,
    mask_packed,
    mask_ring,
    masked_words,
    ring_tile_used,
    split_used,
)
from qattn_kernels.ops.decode.weights import soft_cap, weights

TILE = tl.constexpr(64)  # slots of the unpacked keys and values at a time


class Queries(NamedTuple):
    """The queries of a program, as the products take their two parts.

    Attributes:
        latent, rope: `[DP, Q]`: fp16 in [-1, 1] beside codes, else as the model made them.
        latent_unit, rope_unit: fp32 `[Q]`, what 1 of their product is worth, in log2 units.
    """

    latent: Any
    rope: Any
    latent_unit: Any
    rope_unit: Any


class Tile(NamedTuple):
    """Some stored tokens: latents and RoPE parts `[TOKENS, DP]`, and fp32 `[TOKENS]` the scales of those with codes."""

    latent: Any
    latent_scale: Any
    rope: Any
    rope_scale: Any


class Running(NamedTuple):
    """Running state of an online softmax.

    Attributes:
        m, l: fp32 `[Q]`, the largest score and the sum of the weights against it.
        acc: fp32 `[DP, Q]`, the sum of weighted latents, in units of `unit`.
        unit: the largest scale of a latent so far; 1 where latents have no codes.
    """

    m: Any
    l: Any
    acc: Any
    unit: Any


@triton.jit
def _operand(x, scale, top, CODES: tl.constexpr, C: tl.constexpr):
    """One part of the queries as its product takes it, and its unit."""
    if CODES:
        return (x.to(tl.float32) * (scale / top)[None, :]).to(tl.float16), top
    elif C.PLAIN:  # the interpreter knows no products of bf16
        return x.to(tl.float32), tl.zeros_like(top) + scale
    else:
        return x, tl.zeros_like(top) + scale


@triton.jit
def _load_queries(Q, strides, b, n, row, real, scale, K_CODES: tl.constexpr, V_CODES: tl.constexpr, C: tl.constexpr):
    """Queries `n` of a row as `Queries`, and which of them are not finite: those stand as zeros. A query has its latent
    part first. `real`: which of them the row has."""
    V_C: tl.constexpr = C.V
    d, r = tl.arange(0, V_C.DP), tl.arange(0, C.DP)
    head, column = n % C.G, row.first + n // C.G
    at = Q + b.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + column.to(tl.int64) * strides[2]
    latent = tl.load(at[None, :] + d[:, None], mask=real[None, :] & (d < V_C.D)[:, None], other=0.0)
    rope = tl.load(at[None, :] + V_C.D + r[:, None], mask=real[None, :] & (r < C.D)[:, None], other=0.0)
    nonfinite = broken(latent.to(tl.float32), 0) | broken(rope.to(tl.float32), 0)
    latent, rope = tl.where(nonfinite[None, :], 0.0, latent), tl.where(nonfinite[None, :], 0.0, rope)
    top = tl.maximum(tl.max(tl.abs(latent.to(tl.float32)), 0), tl.max(tl.abs(rope.to(tl.float32)), 0))
    top = top * tl.abs(scale) + TINY
    latent, latent_unit = _operand(latent, scale, top, V_CODES, C)
    rope, rope_unit = _operand(rope, scale, top, K_CODES, C)
    return Queries(latent, rope, latent_unit, rope_unit), nonfinite


@triton.jit
def _nothing(CODES: tl.constexpr, C: tl.constexpr):
    """`Running` before the first tile."""
    V_C: tl.constexpr = C.V
    m, l = tl.full([C.Q], NOTHING, tl.float32), tl.full([C.Q], 0.0, tl.float32)
    return Running(m, l, tl.full([V_C.DP, C.Q], 0.0, tl.float32), tl.full([], TINY if CODES else 1.0, tl.float32))


@triton.jit
def _scores(tile, queries, scoring, K_CODES: tl.constexpr, V_CODES: tl.constexpr, C: tl.constexpr):
    """Scores `[TOKENS, Q]` of a tile: of the latents and of the RoPE parts, each with the scales of its own codes."""
    s = tl.dot(tile.latent, queries.latent, input_precision="ieee") * queries.latent_unit[None, :]
    if V_CODES:
        s = s * tile.latent_scale[:, None]
    r = tl.dot(tile.rope, queries.rope, input_precision="ieee") * queries.rope_unit[None, :]
    if K_CODES:
        r = r * tile.rope_scale[:, None]
    s += r
    return soft_cap(s, scoring.softcap) if C.SOFTCAP else s


@triton.jit
def _take(s, tile, sums, scoring, V_CODES: tl.constexpr, C: tl.constexpr):
    """A tile with its masked scores into the sums. Weights are against the running maximum, so that the product adds to
    the accumulator where it stands: a second one would not fit the registers."""
    m = tl.maximum(sums.m, tl.max(s, 0))
    p, alpha, unit = weights(s, m, m, scoring.sas_threshold, C), tl.exp2(sums.m - m), sums.unit
    l = sums.l * alpha + tl.sum(p, 0)
    if V_CODES:
        unit = tl.maximum(unit, tl.max(tile.latent_scale, 0))
        p = p * (tile.latent_scale / unit)[:, None]
        alpha = alpha * (sums.unit / unit)
    p, acc = p.to(tile.latent.dtype), sums.acc * alpha[None, :]
    return Running(m, l, tl.dot(tl.trans(tile.latent), p, acc=acc, input_precision="ieee"), unit)


@triton.jit
def _ring_part(K, V, program, part, sums, K_CODES: tl.constexpr, V_CODES: tl.constexpr, C: tl.constexpr):
    """Attention over one of the `C.RING_PARTS` parts of the ring, in the order of its slots."""
    V_C: tl.constexpr = C.V
    SLOTS: tl.constexpr = C.RING // C.RING_PARTS
    queries, scoring, bh = program.query, program.scoring, program.bh
    for start in tl.range(part * SLOTS, (part + 1) * SLOTS, RING_TILE, num_stages=1):
        if ring_tile_used(program.row, start, C):
            slot = start + tl.arange(0, RING_TILE)
            latent, latent_scale = from_ring(V, slot, slot >= 0, bh, True, V_C)
            rope, rope_scale = from_ring(K, slot, slot >= 0, bh, False, C)
            tile = Tile(latent.to(queries.latent.dtype), latent_scale, rope.to(queries.rope.dtype), rope_scale)
            s = mask_ring(_scores(tile, queries, scoring, K_CODES, V_CODES, C), slot, program, C)
            sums = _take(s, tile, sums, scoring, V_CODES, C)
    return sums


@triton.jit
def _packed_part(K, V, program, blocks, sums, K_GET: tl.constexpr, V_GET: tl.constexpr, K_CODES: tl.constexpr,
                 V_CODES: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Attention over packed blocks, each dequantized as far as its scales allow."""
    V_C: tl.constexpr = C.V
    b, queries, scoring = program.b, program.query, program.scoring
    for block in tl.range(blocks.begin, blocks.end, num_stages=STAGES):
        latent, latent_scale = V_GET(V, b, program.h, block, program.capacity, 0, True, V_C)
        rope, rope_scale = K_GET(K, b, program.h, block, program.capacity, 0, False, C)
        tile = Tile(latent.to(queries.latent.dtype), latent_scale, rope.to(queries.rope.dtype), rope_scale)
        masked = masked_words(program.dropped.to(tl.pointer_type(tl.int32)), block, C)
        s = _scores(tile, queries, scoring, K_CODES, V_CODES, C)
        s = mask_packed(s, block, block, masked, tl.load(blocks.length + block), program, blocks, C)
        sums = _take(s, tile, sums, scoring, V_CODES, C)
    return sums


@triton.jit(do_not_specialize=["NB", "B", "T", "few", "many", "long", "least"])
def latent_decode_kernel(Q, strides, ROWS, K, V, DROPPED, BLOCK_POS, BLOCK_LEN, STATE, OUT, STATS, NB, B, T, scoring,
                         few, many, long, least, STAGES: tl.constexpr, K_GET: tl.constexpr, V_GET: tl.constexpr,
                         K_CODES: tl.constexpr, V_CODES: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Program (row, queries, split): a part of the context for up to `Q` queries, those of all heads one token behind
    the other. Splits and arguments as of `ops.decode.kernel.decode_kernel`; `OUT` fp32 `[B, splits, T * G, DV]`,
    `STATS` the same with 2 for DV. `K_CODES`, `V_CODES`: whether RoPE parts and latents have codes."""
    b, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    V_C: tl.constexpr = C.V
    row, splits = load_row(ROWS, b), tl.num_programs(2)
    n = tile * C.Q + tl.arange(0, C.Q)
    real = n // C.G < row.count
    blocks = blocks_seen(row, NB, C)
    per_split = blocks_per_split(blocks, splits, few, many, long, least, C)
    begin = (split - C.OPEN) * per_split
    end = tl.minimum(begin + per_split, blocks)
    if (split == 0) & (tile == 0):
        commit_row(ROWS, STATE, row, b, B, T, C)
    used = (split < C.OPEN) | (begin < end)
    if C.RING_PARTS > 1:
        used = used & split_used(split, row, C)
    if used:
        scores = Scoring(*scoring)
        queries, nonfinite = _load_queries(Q, strides, b, n, row, real, scores.scale, K_CODES, V_CODES, C)
        q_pos = tl.where(real, row.length + n // C.G, -1)
        dropped = DROPPED + b.to(tl.int64) * NB * (C.BLOCK // 8)
        program = Program(b, 0, b, row, NB, None, dropped, q_pos, queries, scores)
        sums = _nothing(V_CODES, C)
        if split < C.OPEN:
            if C.RING > 0:
                sums = _ring_part(K, V, program, split, sums, K_CODES, V_CODES, C)
        else:
            packed = Blocks(begin, end, BLOCK_POS + b * NB, BLOCK_LEN + b * NB, None, None, None, None)
            sums = _packed_part(K, V, program, packed, sums, K_GET, V_GET, K_CODES, V_CODES, STAGES, C)
        found = Sums(sums.m, sums.l, sums.acc * sums.unit)
        store_split(OUT, STATS, None, b, split, splits, n, T, real, nonfinite, found, None, channels, V_C)


@triton.jit
def _unpacked_side(x, scale, b, i, N, CODES: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr):
    """Slots `i` of unpacked keys or values: `[TILE, DP]`, and scales of those with codes."""
    d, base = tl.arange(0, C.DP), b.to(tl.int64) * N
    if CODES and VALUES:
        at = base * C.D + d[None, :] * N + i[:, None]
    else:
        at = base * C.D + i[:, None] * C.D + d[None, :]
    tokens = tl.load(x + at, mask=(d < C.D)[None, :], other=0)
    if CODES:
        return tokens, tl.load(scale + base + i)
    else:
        return tokens, tl.full(i.shape, 0.0, tl.float32)


@triton.jit
def _finish(sums, SINKS, OUT, LSE, b, n, row, real, nonfinite, T, SINK_LOGITS: tl.constexpr, C: tl.constexpr):
    """Normalise and write the outputs of queries `n`, and their log-sum-exp: zeros for columns without a token, and for
    queries that see nothing; NaN outputs of queries that are not finite."""
    V_C: tl.constexpr = C.V
    d, t, head = tl.arange(0, V_C.DP), n // C.G, n % C.G
    top, total, acc = sums.m, tl.where(sums.m > NOTHING, sums.l, 0.0), sums.acc
    if SINK_LOGITS:
        sink = tl.load(SINKS + head).to(tl.float32) * LOG2E
        new = tl.maximum(top, sink)
        fade = tl.exp2(top - new)
        acc, total, top = acc * fade[None, :], total * fade + tl.exp2(sink - new), new
    some = real & (total > 0.0)
    total = tl.where(some, total, 1.0)
    weight = tl.where(some, sums.unit / total, 0.0) + tl.where(real & nonfinite, float("nan"), 0.0)
    to = row.first + t
    to = tl.where(to < T, to, to - T)  # tokens beyond the row's count stand for its padding columns
    lse = tl.where(some, top * LN2 + tl.log(total), tl.where(real, float("-inf"), 0.0))
    tl.store(LSE + (b.to(tl.int64) * C.G + head) * T + to, lse, mask=t < T)
    at = ((b.to(tl.int64) * T + to) * C.G + head) * V_C.D
    x = (acc * weight[None, :]).to(OUT.dtype.element_ty)
    tl.store(OUT + at[None, :] + d[:, None], x, mask=(t < T)[None, :] & (d < V_C.D)[:, None])


@triton.jit(do_not_specialize=["T", "N"])
def latent_prefill_kernel(Q, strides, ROWS, UNPACKED, SINKS, OUT, LSE, T, N, scoring, SINK_LOGITS: tl.constexpr,
                          STAGES: tl.constexpr, K_CODES: tl.constexpr, V_CODES: tl.constexpr,
                          C: tl.constexpr):  # fmt: skip
    """Program (queries, row) of a long call: `Q` queries, those of all heads one token behind the other, over `N` slots
    of unpacked keys and values; programs with most to read start first. `OUT` `[B, T, G, DV]`, `LSE` fp32
    `[B, G, T]`."""
    tile, b = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    V_C: tl.constexpr = C.V
    row, scores, unpacked = load_row(ROWS, b), Scoring(*scoring), UnpackedTensors(*UNPACKED)
    n = tile * C.Q + tl.arange(0, C.Q)
    real = n // C.G < row.count
    queries, nonfinite = _load_queries(Q, strides, b, n, row, real, scores.scale, K_CODES, V_CODES, C)
    q_pos = tl.where(real, row.length + n // C.G, -1)
    last = tl.minimum((tile * C.Q + C.Q - 1) // C.G, row.count - 1)
    end = row.closed * C.BLOCK + row.length - row.open_start + last + 1
    end = tl.where(tile * C.Q // C.G < row.count, end, 0)
    sums = _nothing(V_CODES, C)
    for n0 in tl.range(0, end, TILE, num_stages=STAGES):
        i = n0 + tl.arange(0, TILE)
        latent, latent_scale = _unpacked_side(unpacked.v, unpacked.v_scale, b, i, N, V_CODES, True, V_C)
        rope, rope_scale = _unpacked_side(unpacked.k, unpacked.k_scale, b, i, N, K_CODES, False, C)
        tile_ = Tile(latent.to(queries.latent.dtype), latent_scale, rope.to(queries.rope.dtype), rope_scale)
        s = _scores(tile_, queries, scores, K_CODES, V_CODES, C)
        slot = b.to(tl.int64) * N + i
        pos = tl.load(unpacked.pos + slot)
        see = (tl.load(unpacked.bias + slot) == 0.0)[:, None] & (pos[:, None] <= q_pos[None, :])
        if C.LOCAL:
            see = see & (pos[:, None] > (q_pos - scores.window)[None, :])
        sums = _take(tl.where(see, s, NOTHING), tile_, sums, scores, V_CODES, C)
    _finish(sums, SINKS, OUT, LSE, b, n, row, real, nonfinite, T, SINK_LOGITS, C)
