"""INT8 with one scale per token in kernels. `formats/int8/reference.py` is the specification.

Other formats use these functions for their INT8 ring."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.contract import JitFormat
from qattn_kernels.jit.math import SMALLEST_NORMAL, TINY, divide, float_to_int8, inverse_of, round_even
from qattn_kernels.jit.rows import block_of
from qattn_kernels.jit.split_int8 import SPLIT_TOP, dot_split, join_split, split_weights
from qattn_kernels.jit.tile_order import deinterleave, to_token_order, token_order

LEVELS = tl.constexpr(127)


class Tensors(NamedTuple):
    """State tensors of one side, by their names in the state."""

    codes: Any
    scale: Any


@triton.jit
def quantize(x, LEVELS: tl.constexpr):
    """Quantize tokens `[n, D]` to INT8 with one scale each, bit for bit as `int8_tokens`. Needs
    `enable_fp_fusion=False`."""
    return quantize_to(x, tl.max(tl.abs(x), 1), LEVELS)


@triton.jit
def quantize_to(x, top, LEVELS: tl.constexpr):
    """Quantize tokens `[n, D]` to symmetric codes up to `LEVELS`, with `top` `[n]` mapped to the largest code.

    `top` may come from other tokens than the token itself."""
    scale = tl.div_rn(top, tl.full(top.shape, LEVELS, tl.float32))
    scale = tl.where(scale < SMALLEST_NORMAL, 0.0, scale)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    rounded = round_even(divide(x, divisor[:, None]))
    return tl.clamp(rounded, -1.0 * LEVELS, 1.0 * LEVELS), scale


@triton.jit
def quantize_tokens(x):
    return quantize(x, LEVELS)


@triton.jit
def block_form(code, scale, keep):
    return code, scale


@triton.jit
def addresses(codes, at, t, SIDE: tl.constexpr, C: tl.constexpr):
    """Return addresses `[n, DP]` of tokens `t` of a block. Values are stored `[D, tokens]`, the layout that their
    product reads."""
    d = tl.arange(0, SIDE.DP)
    if SIDE.VALUES:
        return codes + at * (C.BLOCK * SIDE.D) + d[None, :] * C.BLOCK + t[:, None]
    return codes + at * (C.BLOCK * SIDE.D) + t[:, None] * SIDE.D + d[None, :]


@triton.jit
def put(S, tokens, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Store tokens `t` of a block in final form, where `write` is true."""
    at = block_of(slot, C)
    inside = tl.arange(0, SIDE.DP) < SIDE.D
    tl.store(
        addresses(S.codes, at, tokens.t, SIDE, C),
        float_to_int8(tokens.code),
        mask=tokens.write[:, None] & inside[None, :],
    )
    tl.store(S.scale + at * C.BLOCK + tokens.t, tokens.scale, mask=tokens.write)


@triton.jit
def get(S, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Return INT8 tokens `[BLOCK, DP]` of a block, and their scales."""
    at = block_of(slot, C)
    t, inside = tl.arange(0, C.BLOCK), tl.arange(0, SIDE.DP) < SIDE.D
    return tl.load(addresses(S.codes, at, t, SIDE, C), mask=inside[None, :], other=0), tl.load(
        S.scale + at * C.BLOCK + t
    )


@triton.jit
def numbers(x, C: tl.constexpr):
    """Return INT8 codes unchanged, and FP8 bytes as E4M3 or fp16 numbers.

    With `C.SHIFTS_FP8`, exponent and mantissa move to their places in an fp16, whose exponent bias is 8 larger."""
    if x.dtype != tl.uint8:
        return x
    elif C.SHIFTS_FP8:
        wide = x.to(tl.int16)
        bits = ((wide & 127) << 7) | ((wide & 128) << 8)
        return bits.to(tl.float16, bitcast=True) * 256.0
    else:
        return x.to(tl.float8e4nv, bitcast=True)


@triton.jit
def token_scores(codes, scales, TOKENS: tl.constexpr, PARTS: tl.constexpr, query, SIDE: tl.constexpr, C: tl.constexpr):
    """Return scores `[TOKENS, Q]`, in `token_order`, of consecutive keys."""
    t, d = tl.arange(0, TOKENS), tl.arange(0, SIDE.DP)
    k = numbers(
        tl.load(codes + token_order(TOKENS, PARTS)[:, None] * SIDE.D + d[None, :], mask=(d < SIDE.D)[None, :], other=0),
        C,
    )
    if C.N > C.Q:
        s = join_split(dot_split(k, query.operand))
    else:  # codes are exact in fp16, and converting to fp16 is much cheaper than to bf16
        s = tl.dot(k.to(tl.float16), query.operand)
    return s * query.scale[None, :] * to_token_order(tl.load(scales + t), PARTS)[:, None]


@triton.jit
def token_values(
    codes,
    scales,
    stride,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    p,
    acc,
    alpha,
    beta,
    SIDE: tl.constexpr,
    C: tl.constexpr,
):
    """Add values stored `[D, tokens]`, with channels `stride` apart, weighted by `p` in `token_order`.

    Each weight is multiplied by its value's scale before the weights are rounded."""
    t, d = tl.arange(0, TOKENS), tl.arange(0, SIDE.DP)
    v = numbers(tl.load(codes + d[:, None] * stride + t[None, :], mask=(d < SIDE.D)[:, None], other=0), C)
    w = p * to_token_order(tl.load(scales + t), PARTS)[:, None]
    top = tl.maximum(tl.max(w, 0), TINY)
    if C.N > C.Q:
        o = join_split(dot_split(v, split_weights(deinterleave(w * (inverse_of(top) * SPLIT_TOP)[None, :], PARTS), C)))
        unit = 1.0 / 127.0
    else:
        o = tl.dot(v.to(tl.float16), deinterleave(w * inverse_of(top)[None, :], PARTS).to(tl.float16))
        unit = 1.0
    return acc * alpha[None, :] + o * (beta * (top * unit))[None, :], tl.sum(p, 0)


@triton.jit
def scores(S, at, query, SIDE: tl.constexpr, C: tl.constexpr):
    codes, scales = S.codes + at.block * (C.BLOCK * SIDE.D), S.scale + at.block * C.BLOCK
    return token_scores(codes, scales, C.BLOCK, C.PARTS, query, SIDE, C)


@triton.jit
def values(S, at, p, acc, alpha, beta, SIDE: tl.constexpr, C: tl.constexpr):
    codes, scales = S.codes + at.block * (C.BLOCK * SIDE.D), S.scale + at.block * C.BLOCK
    return token_values(codes, scales, C.BLOCK, C.BLOCK, C.PARTS, p, acc, alpha, beta, SIDE, C)


JIT = JitFormat(
    Tensors=Tensors,
    quantize_tokens=quantize_tokens,
    block_form=block_form,
    put=put,
    get=get,
    scores=scores,
    values=values,
    fuses=True,
)
