"""INT8 with one scale a token in kernels: `stores/int8.py` is the specification. Also the INT8 ring of other stores."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.jit import join_twins, round_even, twin

LEVELS = tl.constexpr(127)


class Tensors(NamedTuple):
    """Of one side of a layer, by the names of its state."""

    codes: Any
    scale: Any


@triton.jit
def quantize(x, LEVELS: tl.constexpr):
    """INT8 tokens `[n, D]` with one scale each, bit for bit as `int8_tokens`; needs `enable_fp_fusion=False`."""
    top = tl.max(tl.abs(x), 1)
    scale = tl.div_rn(top, tl.full(top.shape, LEVELS, tl.float32))
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    rounded = round_even(tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape)))
    return tl.clamp(rounded, -1.0 * LEVELS, 1.0 * LEVELS), scale


@triton.jit
def open(x):
    return quantize(x, LEVELS)


@triton.jit
def seen(code, scale):
    return code, scale


@triton.jit
def place(S, b, h, first, VALUES: tl.constexpr, C: tl.constexpr):
    return h


@triton.jit
def locate(S, b, h, LOW: tl.constexpr, C: tl.constexpr):
    return h, (b * C.H + h).to(tl.int64)


@triton.jit
def addresses(codes, at, t, VALUES: tl.constexpr, C: tl.constexpr):
    """Addresses `[n, DP]` of tokens `t` of a block; values lie `[D, tokens]`, as their product wants them."""
    d = tl.arange(0, C.DP)
    if VALUES:
        return codes + at * (C.BLOCK * C.D) + d[None, :] * C.BLOCK + t[:, None]
    return codes + at * (C.BLOCK * C.D) + t[:, None] * C.D + d[None, :]


@triton.jit
def put(S, code, scale, keep, write, t, b, h, index, NB, place, VALUES: tl.constexpr, C: tl.constexpr):
    """Tokens `t` of a block in their final form, where `write` holds."""
    at = (b * C.H + h).to(tl.int64) * NB + index
    inside = tl.arange(0, C.DP) < C.D
    tl.store(addresses(S.codes, at, t, VALUES, C), code.to(tl.int8), mask=write[:, None] & inside[None, :])
    tl.store(S.scale + at * C.BLOCK + t, scale, mask=write)


@triton.jit
def get(S, b, h, index, NB, place, VALUES: tl.constexpr, C: tl.constexpr):
    """INT8 tokens `[BLOCK, DP]` of a block, and their scales."""
    at = (b * C.H + h).to(tl.int64) * NB + index
    t, inside = tl.arange(0, C.BLOCK), tl.arange(0, C.DP) < C.D
    return tl.load(addresses(S.codes, at, t, VALUES, C), mask=inside[None, :], other=0), tl.load(
        S.scale + at * C.BLOCK + t
    )


@triton.jit
def numbers(x):
    """INT8 codes as they are; bytes, which are FP8's, as numbers of E4M3."""
    if x.dtype == tl.uint8:
        return x.to(tl.float8e4nv, bitcast=True)
    else:
        return x


@triton.jit
def token_scores(k, scale, query, query_scale, C: tl.constexpr):
    """Scores `[n, Q]` of INT8 tokens `k` `[n, DP]` in log2 units."""
    if C.INT8:
        s = join_twins(tl.dot(k, query[2], out_dtype=tl.int32)) * query[3][None, :]
    else:
        s = tl.dot(k.to(query[0].dtype), query[0], input_precision="ieee") * query_scale
    return s * scale[:, None]


@triton.jit
def pair_scores(codes, scales, HALF: tl.constexpr, query, query_scale, C: tl.constexpr):
    """Scores of two half tiles of INT8 keys that lie one after the other."""
    t, d = tl.arange(0, HALF), tl.arange(0, C.DP)
    at = codes + t[:, None] * C.D + d[None, :]
    lo = numbers(tl.load(at, mask=(d < C.D)[None, :], other=0))
    hi = numbers(tl.load(at + HALF * C.D, mask=(d < C.D)[None, :], other=0))
    s_lo = token_scores(lo, tl.load(scales + t), query, query_scale, C)
    s_hi = token_scores(hi, tl.load(scales + HALF + t), query, query_scale, C)
    return s_lo, s_hi


@triton.jit
def pair_values(codes, scales, stride, HALF: tl.constexpr, p_lo, p_hi, acc, alpha, beta, dtype: tl.constexpr,
                C: tl.constexpr):  # fmt: skip
    """The same for values, whose channels lie `stride` apart: a scale is multiplied into its token's weight before
    the weights are rounded."""
    t, d = tl.arange(0, HALF), tl.arange(0, C.DP)
    at = codes + d[:, None] * stride + t[None, :]
    lo = numbers(tl.load(at, mask=(d < C.D)[:, None], other=0))
    hi = numbers(tl.load(at + HALF, mask=(d < C.D)[:, None], other=0))
    w_lo, w_hi = p_lo * tl.load(scales + t)[:, None], p_hi * tl.load(scales + HALF + t)[:, None]
    top = tl.maximum(tl.max(tl.maximum(w_lo, w_hi), 0), 1e-30)
    if C.INT8:
        up = (127.0 / top)[None, :]
        o = tl.dot(lo, twin(w_lo * up), out_dtype=tl.int32)
        o = join_twins(tl.dot(hi, twin(w_hi * up), acc=o, out_dtype=tl.int32))
        unit = 1.0 / 127.0
    else:
        up = (1.0 / top)[None, :]
        o = tl.dot(lo.to(dtype), (w_lo * up).to(dtype), input_precision="ieee")
        o = tl.dot(hi.to(dtype), (w_hi * up).to(dtype), acc=o, input_precision="ieee")
        unit = 1.0
    return acc * alpha[None, :] + o * (beta * (top * unit))[None, :], tl.sum(p_lo + p_hi, 0)


@triton.jit
def scores(S, at, place_at, place, query, query_scale, C: tl.constexpr):
    return pair_scores(S.codes + at * (C.BLOCK * C.D), S.scale + at * C.BLOCK, C.BLOCK // 2, query, query_scale, C)


@triton.jit
def values(S, at, place_at, place, p_lo, p_hi, acc, alpha, beta, dtype: tl.constexpr, C: tl.constexpr):
    return pair_values(
        S.codes + at * (C.BLOCK * C.D),
        S.scale + at * C.BLOCK,
        C.BLOCK,
        C.BLOCK // 2,
        p_lo,
        p_hi,
        acc,
        alpha,
        beta,
        dtype,
        C,
    )
