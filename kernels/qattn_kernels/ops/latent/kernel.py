"""Latent attention (MLA) in Triton.

The decode reads packed blocks and the ring, split-KV as in `ops/decode/kernel.py`. The prefill reads unpacked keys and
values. The specifications are the `reference.py` of `ops/decode` and of `ops/prefill`.

All query heads share a token's latent, and both products use it. A program therefore dequantizes a tile of latents once
for up to 64 queries. Codes are exact in 16 bits and enter the products unscaled. A token's scale multiplies its score
and, relative to the largest scale so far, its weight. Operands without codes are multiplied in a 16-bit model's dtype.
In an fp32 model they are divided by their largest magnitude and multiplied in fp16, because fp32 tiles do not fit
shared memory.

Queries are rows here, unlike in `ops/decode/kernel.py`. Tiles of tokens are then the second operand of both products,
so Hopper's tensor cores can read one shared-memory copy for both. Queries are loaded twice: the sums fill half of the
registers, and keeping the fp32 values of the first load would need the rest.

Scores are in log2 units. `V` are the latents, `K` the RoPE parts, and `C` is a `Sizes`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.contract import Slot
from qattn_kernels.jit.math import LN2, LOG2E, NOTHING, TINY, broken
from qattn_kernels.jit.rows import in_window, load_row, queries_end, result_column
from qattn_kernels.jit.tokens import from_ring
from qattn_kernels.launch.unpacked_kv import UnpackedTensors
from qattn_kernels.layout import BlockState
from qattn_kernels.ops.decode.masks import mask_packed, mask_ring, masked_words
from qattn_kernels.ops.decode.open_tokens import RING_TILE, ring_tile_used
from qattn_kernels.ops.decode.parts import (
    Blocks,
    Program,
    Scoring,
    Sums,
)
from qattn_kernels.ops.decode.queries import QuerySource
from qattn_kernels.ops.decode.splits import (
    Results,
    blocks_seen,
    cut_blocks,
    range_of,
    read_rule,
    split_exists,
    store_split,
)
from qattn_kernels.ops.decode.weights import soft_cap
from qattn_kernels.ops.prefill.weights import exponentials

TILE = tl.constexpr(64)  # slots of unpacked keys and values that a program reads at a time


class Forms(NamedTuple):
    """Constants of the kernels in addition to `Sizes`.

    Attributes:
        K_CODES, V_CODES: whether RoPE parts and latents have codes.
        WIDE: whether the model's dtype is fp32.
    """

    K_CODES: bool
    V_CODES: bool
    WIDE: bool


class Queries(NamedTuple):
    """The queries of a program, as operands of the products.

    Attributes:
        latent, rope: `[Q, DP]`, the two parts in the model's dtype. fp32 queries are divided by `top` and in fp16.
        scale: multiplies the products with keys.
        top: fp32 `[Q]`, the largest magnitude in each query.
    """

    latent: Any
    rope: Any
    scale: Any
    top: Any


class Tile(NamedTuple):
    """Stored tokens, as operands of the products.

    Attributes:
        latent, rope: `[TOKENS, DP]`.
        latent_scale, rope_scale: fp32 `[TOKENS]`, used where the operand was divided by a scale.
    """

    latent: Any
    latent_scale: Any
    rope: Any
    rope_scale: Any


class Running(NamedTuple):
    """Running state of an online softmax.

    Attributes:
        m, l: fp32 `[Q]`, the largest score and the sum of the weights relative to it.
        acc: fp32 `[Q, DP]`, the sum of weighted latents, in units of `unit`.
        unit: the largest scale of a latent so far; 1 if latents have no scale.
    """

    m: Any
    l: Any
    acc: Any
    unit: Any


@triton.jit
def _operand(x, top, C: tl.constexpr):
    """Convert one part of the queries to an operand of its product."""
    if x.dtype == tl.float32:
        return (x / top[:, None]).to(tl.float16)
    elif C.PLAIN:  # the interpreter cannot multiply bf16 matrices
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def _load_queries(source, b, n, row, real, scale, C: tl.constexpr):
    """Load queries `n` of a row as `Queries`, and return which of them are not finite; zeros replace these.

    A query begins with its latent part. `real`: which of `n` exist."""
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    d, r = tl.arange(0, V_SIDE.DP), tl.arange(0, K_SIDE.DP)
    head, column = n % C.G, row.first + n // C.G
    strides = source.strides
    at = b.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + column.to(tl.int64) * strides[2]
    latents, ropes = source.x + at[:, None] + d[None, :], source.x + at[:, None] + V_SIDE.D + r[None, :]
    d, r, there = (d < V_SIDE.D)[None, :], (r < K_SIDE.D)[None, :], real[:, None]
    latent = tl.load(latents, mask=there & d, other=0.0).to(tl.float32)
    rope = tl.load(ropes, mask=there & r, other=0.0).to(tl.float32)
    nonfinite = broken(latent, 1) | broken(rope, 1)
    top = tl.maximum(tl.max(tl.abs(latent), 1), tl.max(tl.abs(rope), 1)) + TINY
    top = tl.where(nonfinite, 1.0, top)
    there = (real & ~nonfinite)[:, None]
    latent, rope = tl.load(latents, mask=there & d, other=0.0), tl.load(ropes, mask=there & r, other=0.0)
    return Queries(_operand(latent, top, C), _operand(rope, top, C), scale, top), nonfinite


@triton.jit
def _tokens(x, scale, query, CODES: tl.constexpr, F: tl.constexpr):
    """Convert one part of some tokens to an operand of the product with `query`, and return it with its scales."""
    if F.WIDE and not CODES:
        top = tl.max(tl.abs(x), 1) + TINY
        return (x / top[:, None]).to(query.dtype), top
    else:
        return x.to(query.dtype), scale


@triton.jit
def _tile(latent, latent_scale, rope, rope_scale, queries, F: tl.constexpr):
    """Make a `Tile` of dequantized or loaded tokens."""
    latent, latent_scale = _tokens(latent, latent_scale, queries.latent, F.V_CODES, F)
    rope, rope_scale = _tokens(rope, rope_scale, queries.rope, F.K_CODES, F)
    return Tile(latent, latent_scale, rope, rope_scale)


@triton.jit
def _nothing(F: tl.constexpr, C: tl.constexpr):
    """Return the `Running` state before the first tile."""
    V_SIDE: tl.constexpr = C.V
    acc, unit = tl.full([C.Q, V_SIDE.DP], 0.0, tl.float32), TINY if F.V_CODES or F.WIDE else 1.0
    m, l = tl.full([C.Q], NOTHING, tl.float32), tl.full([C.Q], 0.0, tl.float32)
    return Running(m, l, acc, tl.full([], unit, tl.float32))


@triton.jit
def _part_scores(query, x, x_scale, queries, CODES: tl.constexpr, F: tl.constexpr):
    """Multiply one part of the queries with the same part of a tile."""
    s = tl.dot(query, tl.trans(x))
    if F.WIDE:
        s = s * queries.top[:, None]
    return s * (x_scale * queries.scale)[None, :] if CODES or F.WIDE else s * queries.scale


@triton.jit
def _scores(tile, queries, scoring, F: tl.constexpr, C: tl.constexpr):
    """Return the scores `[Q, TOKENS]` of a tile. Latents and RoPE parts have separate scales."""
    s = _part_scores(queries.latent, tile.latent, tile.latent_scale, queries, F.V_CODES, F)
    s += _part_scores(queries.rope, tile.rope, tile.rope_scale, queries, F.K_CODES, F)
    return soft_cap(s, scoring.softcap) if C.SOFTCAP else s


@triton.jit
def _take(s, tile, sums, scoring, F: tl.constexpr, C: tl.constexpr):
    """Add a tile with masked scores `s` to the sums.

    Weights are relative to the running maximum, so the product can accumulate in place. A second accumulator would not
    fit the registers."""
    m = tl.maximum(sums.m, tl.max(s, 1))
    p, alpha, unit = exponentials(s - m[:, None], scoring.sas_threshold, C), tl.exp2(sums.m - m), sums.unit
    l = sums.l * alpha + tl.sum(p, 1)
    if F.V_CODES or F.WIDE:
        unit = tl.maximum(unit, tl.max(tile.latent_scale, 0))
        p = p * (tile.latent_scale / unit)[None, :]
        alpha = alpha * (sums.unit / unit)
    p, acc = p.to(tile.latent.dtype), sums.acc * alpha[:, None]
    return Running(m, l, tl.dot(p, tile.latent, acc=acc), unit)


@triton.jit
def _ring_part(K, V, program, part, sums, F: tl.constexpr, C: tl.constexpr):
    """Attend to one of the `C.RING_PARTS` parts of the ring, in the order of its slots."""
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    SLOTS: tl.constexpr = C.RING // C.RING_PARTS
    queries, scoring, bh = program.query, program.scoring, program.bh
    for start in tl.range(part * SLOTS, (part + 1) * SLOTS, RING_TILE, num_stages=1):
        if ring_tile_used(program.row, start, C):
            slot = start + tl.arange(0, RING_TILE)
            latent, latent_scale = from_ring(V, slot, slot >= 0, bh, V_SIDE, C)
            rope, rope_scale = from_ring(K, slot, slot >= 0, bh, K_SIDE, C)
            tile = _tile(latent, latent_scale, rope, rope_scale, queries, F)
            masked = mask_ring(tl.full([RING_TILE, C.Q], 0.0, tl.float32), slot, program, C)
            s = _scores(tile, queries, scoring, F, C) + tl.trans(masked)
            sums = _take(s, tile, sums, scoring, F, C)
    return sums


@triton.jit
def _packed_part(K, V, program, blocks, sums, K_GET: tl.constexpr, V_GET: tl.constexpr, STAGES: tl.constexpr,
                 F: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Attend to packed blocks. Scales that the scores and weights can take are left out of the dequantization."""
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    b, queries, scoring = program.b, program.query, program.scoring
    for block in tl.range(blocks.begin, blocks.end, num_stages=STAGES):
        slot = Slot(b, program.h, block, program.capacity, 0)
        latent, latent_scale = V_GET(V, slot, V_SIDE, C)
        rope, rope_scale = K_GET(K, slot, K_SIDE, C)
        tile = _tile(latent, latent_scale, rope, rope_scale, queries, F)
        words = masked_words(program.dropped.to(tl.pointer_type(tl.int32)), block, C)
        masked, tokens = tl.full([C.BLOCK, C.Q], 0.0, tl.float32), tl.load(blocks.length + block)
        masked = mask_packed(masked, block, block, words, tokens, program, blocks, C)
        s = _scores(tile, queries, scoring, F, C) + tl.trans(masked)
        sums = _take(s, tile, sums, scoring, F, C)
    return sums


@triton.jit(do_not_specialize=["NB", "T"])
def latent_decode_kernel(QUERIES, ROWS, LAYER, RESULTS, NB, T, scoring, SHARES, STAGES: tl.constexpr,
                         K_GET: tl.constexpr, V_GET: tl.constexpr, F: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Attend to one split of the context for `Q` queries. One program per (row, tile of queries, split).

    Queries are in the order of tokens, then heads. Splits and arguments are as in `ops.decode.kernel.decode_kernel`
    with one KV head. `K_GET`, `V_GET`: `get` of the formats of RoPE parts and of latents. `F`: the `Forms`."""
    b, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, splits = load_row(ROWS, b), tl.num_programs(2)
    n = tile * C.Q + tl.arange(0, C.Q)
    real = n // C.G < queries_end(row, T, C)
    rule = read_rule(SHARES)
    cut = cut_blocks(blocks_seen(row, NB, C), rule, C)
    if split_exists(split, row, cut, rule, C):
        scores, state = Scoring(*scoring), BlockState(*LAYER.blocks)
        queries, nonfinite = _load_queries(QuerySource(*QUERIES), b, n, row, real, scores.scale, C)
        q_pos = tl.where(real, row.length + n // C.G, -1)
        dropped = state.dropped + b.to(tl.int64) * NB * (C.BLOCK // 8)
        program = Program(b, 0, b, row, NB, None, dropped, q_pos, queries, scores)
        sums = _nothing(F, C)
        if split < rule.open:
            if C.RING > 0:
                sums = _ring_part(LAYER.k, LAYER.v, program, split, sums, F, C)
        else:
            pos, length = state.block_pos + b * NB, state.block_len + b * NB
            begin, end = range_of(cut, split - rule.open)
            packed = Blocks(begin, end, pos, length, None, None, None, None)
            sums = _packed_part(LAYER.k, LAYER.v, program, packed, sums, K_GET, V_GET, STAGES, F, C)
        found = Sums(sums.m, sums.l, tl.trans(sums.acc * sums.unit))
        store_split(Results(*RESULTS), b, split, splits, n, T, real, nonfinite, found, None, C)


@triton.jit
def _unpacked_side(x, scale, b, i, N, CODES: tl.constexpr, SIDE: tl.constexpr):
    """Load slots `i` of unpacked keys or values, `[TILE, DP]`, and their scales; zeros without codes."""
    d, base = tl.arange(0, SIDE.DP), b.to(tl.int64) * N
    if CODES and SIDE.VALUES:
        at = base * SIDE.D + d[None, :] * N + i[:, None]
    else:
        at = base * SIDE.D + i[:, None] * SIDE.D + d[None, :]
    tokens = tl.load(x + at, mask=(d < SIDE.D)[None, :], other=0)
    if CODES:
        return tokens, tl.load(scale + base + i)
    else:
        return tokens, tl.full(i.shape, 0.0, tl.float32)


@triton.jit
def _finish(sums, SINKS, OUT, LSE, b, n, row, real, nonfinite, T, SINK_LOGITS: tl.constexpr, C: tl.constexpr):
    """Normalise and write the outputs and log-sum-exps of queries `n`.

    Columns without a query and queries that see no token get zeros. Queries that are not finite get NaN outputs."""
    V_SIDE: tl.constexpr = C.V
    d, t, head = tl.arange(0, V_SIDE.DP), n // C.G, n % C.G
    top, total, acc = sums.m, tl.where(sums.m > NOTHING, sums.l, 0.0), sums.acc
    if SINK_LOGITS:
        sink = tl.load(SINKS + head).to(tl.float32) * LOG2E
        new = tl.maximum(top, sink)
        fade = tl.exp2(top - new)
        acc, total, top = acc * fade[:, None], total * fade + tl.exp2(sink - new), new
    some = real & (total > 0.0)
    total = tl.where(some, total, 1.0)
    weight = tl.where(some, sums.unit / total, 0.0) + tl.where(real & nonfinite, float("nan"), 0.0)
    to = result_column(t, row, T)
    lse = tl.where(some, top * LN2 + tl.log(total), tl.where(real, float("-inf"), 0.0))
    tl.store(LSE + (b.to(tl.int64) * C.G + head) * T + to, lse, mask=t < T)
    at = ((b.to(tl.int64) * T + to) * C.G + head) * V_SIDE.D
    x = (acc * weight[:, None]).to(OUT.dtype.element_ty)
    tl.store(OUT + at[:, None] + d[None, :], x, mask=(t < T)[:, None] & (d < V_SIDE.D)[None, :])


@triton.jit(do_not_specialize=["T"])
def latent_prefill_kernel(QUERIES, ROWS, UNPACKED, SINKS, OUT, LSE, T, scoring, SINK_LOGITS: tl.constexpr,
                          STAGES: tl.constexpr, F: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Attend to unpacked keys and values for `Q` queries of a long call. One program per (tile of queries, row).

    Queries are in the order of tokens, then heads. Programs with the most slots to read start first. `OUT`:
    `[B, T, G, DV]`; `LSE`: fp32 `[B, G, T]`."""
    tile, b = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    row, scores, unpacked = load_row(ROWS, b), Scoring(*scoring), UnpackedTensors(*UNPACKED)
    n = tile * C.Q + tl.arange(0, C.Q)
    columns, N = T - row.first, unpacked.slots  # the row's tokens, then padding
    real = n // C.G < columns
    queries, nonfinite = _load_queries(QuerySource(*QUERIES), b, n, row, real, scores.scale, C)
    q_pos = tl.where(real, row.length + n // C.G, -1)
    last = tl.minimum((tile * C.Q + C.Q - 1) // C.G, row.count - 1)
    end = row.closed * C.BLOCK + row.length - row.open_start + last + 1
    end = tl.where(tile * C.Q // C.G < columns, end, 0)
    sums = _nothing(F, C)
    for n0 in tl.range(0, end, TILE, num_stages=STAGES):
        i = n0 + tl.arange(0, TILE)
        latent, latent_scale = _unpacked_side(unpacked.v, unpacked.v_scale, b, i, N, F.V_CODES, V_SIDE)
        rope, rope_scale = _unpacked_side(unpacked.k, unpacked.k_scale, b, i, N, F.K_CODES, K_SIDE)
        tokens = _tile(latent, latent_scale, rope, rope_scale, queries, F)
        s = _scores(tokens, queries, scores, F, C)
        slot = b.to(tl.int64) * N + i
        pos = tl.load(unpacked.pos + slot)
        see = (tl.load(unpacked.bias + slot) == 0.0)[None, :] & (pos[None, :] <= q_pos[:, None])
        if C.LOCAL:
            see = see & in_window(pos[None, :], q_pos[:, None], scores.window, C.CHUNKS)
        sums = _take(tl.where(see, s, NOTHING), tokens, sums, scores, F, C)
    _finish(sums, SINKS, OUT, LSE, b, n, row, real, nonfinite, T, SINK_LOGITS, C)
