"""KIVI in kernels: `formats/kivi/reference.py` is the specification.

A group of tokens is a block, one of channels as large.

Codes enter the products of a decode as integers, exact, whatever the model's precision; queries and weights as 8-bit
INT8 pairs, which err less than bf16 does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.int8.jit import channels
from qattn_kernels.formats.model_ring.jit import JIT as MODEL_RING
from qattn_kernels.formats.packing import code_scores, code_values, half_values, read_codes, write_codes
from qattn_kernels.jit.math import TINY, round_even
from qattn_kernels.jit.split_int8 import SPLIT_TOP, repeated_columns, split_int8, unrepeated_columns
from qattn_kernels.jit.tile_order import by_token, in_line, unstack

LARGEST = tl.constexpr(65504.0)  # of fp16


class Tensors(NamedTuple):
    """The tensors of one side of a layer that the functions here take, by their names in its state."""

    codes: Any
    step: Any
    zero: Any
    ring: Any


@triton.jit
def _asymmetric(low, high, BITS: tl.constexpr):
    low, high = tl.clamp(low, -LARGEST, LARGEST), tl.clamp(high, -LARGEST, LARGEST)
    step = tl.div_rn(high - low, tl.full(low.shape, 2**BITS - 1, tl.float32))
    return step.to(tl.float16), low.to(tl.float16)


@triton.jit
def _encode(x, step, zero, BITS: tl.constexpr):
    step, zero = tl.broadcast_to(step.to(tl.float32), x.shape), tl.broadcast_to(zero.to(tl.float32), x.shape)
    code = round_even(tl.div_rn(x - zero, tl.where(step == 0.0, 1.0, step)))
    return tl.clamp(tl.where(step == 0.0, 0.0, code), 0.0, 2.0**BITS - 1).to(tl.int32)


@triton.jit
def _groups(at, C: tl.constexpr):
    """Where the statistics of values lie: offsets `[BLOCK, groups]` with a mask; groups cover `DP` channels."""
    g, t = tl.arange(0, C.DP // min(C.BLOCK, C.DP)), tl.arange(0, C.BLOCK)
    COUNT: tl.constexpr = (C.D + C.BLOCK - 1) // C.BLOCK
    return at * (COUNT * C.BLOCK) + g[None, :] * C.BLOCK + t[:, None], (g < COUNT)[None, :]


@triton.jit
def _by_group(x, C: tl.constexpr):
    """`[BLOCK, DP]` as `[BLOCK, groups, channels]`."""
    GROUP: tl.constexpr = min(C.BLOCK, C.DP)
    return tl.reshape(x, (C.BLOCK, C.DP // GROUP, GROUP))


@triton.jit
def put(S, code, scale, keep, write, t, b, h, index, NB, place, VALUES: tl.constexpr, C: tl.constexpr):
    """A full block, whose tokens come as they are."""
    at = (b * C.H + h).to(tl.int64) * NB + index
    d = tl.arange(0, C.DP)
    if VALUES:
        x, inside = _by_group(code, C), _by_group(tl.broadcast_to((d < C.D)[None, :], code.shape), C)
        low, high = tl.min(tl.where(inside, x, float("inf")), 2), tl.max(tl.where(inside, x, float("-inf")), 2)
        where, there = _groups(at, C)
        step, zero = _asymmetric(tl.where(there, low, 0.0), tl.where(there, high, 0.0), C.V_BITS)
        tl.store(S.step + where, step, mask=there)
        tl.store(S.zero + where, zero, mask=there)
        coded = tl.reshape(_encode(x, step[:, :, None], zero[:, :, None], C.V_BITS), code.shape)
        write_codes(S.codes, coded, at, C.V_BITS, False, True, C)
    else:
        some = tl.max(keep.to(tl.int32), 0) > 0
        low = tl.where(some, tl.min(tl.where(keep[:, None], code, float("inf")), 0), 0.0)
        high = tl.where(some, tl.max(tl.where(keep[:, None], code, float("-inf")), 0), 0.0)
        step, zero = _asymmetric(low, high, C.K_BITS)
        tl.store(S.step + at * C.D + d, step, mask=d < C.D)
        tl.store(S.zero + at * C.D + d, zero, mask=d < C.D)
        write_codes(S.codes, _encode(code, step[None, :], zero[None, :], C.K_BITS), at, C.K_BITS, False, False, C)


@triton.jit
def get(S, b, h, index, NB, place, VALUES: tl.constexpr, C: tl.constexpr):
    """Tokens `[BLOCK, DP]` of a closed block, dequantized; no scales."""
    at = (b * C.H + h).to(tl.int64) * NB + index
    if VALUES:
        code = read_codes(S.codes, at, C.V_BITS, False, True, C).to(tl.float32)
        where, there = _groups(at, C)
        step = tl.load(S.step + where, mask=there, other=0.0).to(tl.float32)
        zero = tl.load(S.zero + where, mask=there, other=0.0).to(tl.float32)
        x = tl.reshape(_by_group(code, C) * step[:, :, None] + zero[:, :, None], code.shape)
    else:
        step, zero = _channels(S, at, C)
        x = read_codes(S.codes, at, C.K_BITS, False, False, C).to(tl.float32) * step[None, :] + zero[None, :]
    return x, tl.full([C.BLOCK], 0, tl.float32)


@triton.jit
def _channels(S, at, C: tl.constexpr):
    d = tl.arange(0, C.DP)
    step = tl.load(S.step + at * C.D + d, mask=d < C.D, other=0.0).to(tl.float32)
    return step, tl.load(S.zero + at * C.D + d, mask=d < C.D, other=0.0).to(tl.float32)


@triton.jit
def scores(S, at, index, query, query_scale, BITS: tl.constexpr, C: tl.constexpr):
    """Channel steps go into the query, zeros into a sum of their own."""
    step, zero = _channels(S, at, C)
    x = query.scaled * step[:, None]
    size = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 0)  # of positive numbers it is that of their bits, and cheaper
    top = tl.maximum(size.to(tl.float32, bitcast=True), TINY)
    off = tl.sum(query.scaled * zero[:, None], 0)[None, :]
    up = (top * (1.0 / 127.0))[None, :]
    return code_scores(S.codes, at, split_int8(x * (1.0 / top * SPLIT_TOP)[None, :], C), BITS, C) * up + off


@triton.jit
def values(S, at, index, p, acc, alpha, beta, BITS: tl.constexpr, C: tl.constexpr):
    """With one group of channels a token's step goes into its weight; with more, values are dequantized."""
    if (C.BLOCK >= C.D) and (C.BLOCK >= 64):
        t = at * C.BLOCK + tl.arange(0, C.BLOCK)
        w = p * by_token(tl.load(S.step + t).to(tl.float32), C.PARTS)[:, None]
        off = tl.sum(p * by_token(tl.load(S.zero + t).to(tl.float32), C.PARTS)[:, None], 0)
        top = tl.maximum(tl.max(w, 0), TINY)
        o = code_values(S.codes, at, w * (1.0 / top * SPLIT_TOP)[None, :], channels(C), BITS, C)
        o = o * (top * (1.0 / 127.0))[None, :] + off[None, :]
    else:
        lo, hi = half_values(S.codes, at, channels(C), BITS, C)
        p_lo, p_hi = unstack(in_line(p, C.PARTS).to(tl.float16))
        o = tl.dot(_undone_half(S, lo, at, 0, BITS, C), repeated_columns(p_lo, C))
        o = unrepeated_columns(tl.dot(_undone_half(S, hi, at, 1, BITS, C), repeated_columns(p_hi, C), acc=o), C)
    return acc * alpha[None, :] + o * beta[None, :], tl.sum(p, 0)


@triton.jit
def _undone_half(S, code, at, SECOND: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr):
    """Values `[DP, HALF]` of a half tile of codes, in fp16 as their steps and zeros are."""
    HALF: tl.constexpr = C.BLOCK // 2
    GROUP: tl.constexpr = min(C.BLOCK, C.DP)
    COUNT: tl.constexpr = (C.D + C.BLOCK - 1) // C.BLOCK
    g, t = tl.arange(0, C.DP // GROUP), SECOND * HALF + tl.arange(0, HALF)
    where, there = at * (COUNT * C.BLOCK) + g[:, None] * C.BLOCK + t[None, :], (g < COUNT)[:, None]
    step = tl.load(S.step + where, mask=there, other=0.0).to(tl.float32)
    zero = tl.load(S.zero + where, mask=there, other=0.0).to(tl.float32)
    if BITS == 2:
        step *= tl.where(t - SECOND * HALF < HALF // 2, 1.0, 0.25)[None, :]  # see `_crumb_pairs`
    x = tl.reshape(code.to(tl.float32), (C.DP // GROUP, GROUP, HALF)) * step[:, None, :] + zero[:, None, :]
    return tl.reshape(x, (C.DP, HALF)).to(tl.float16)


JIT = MODEL_RING._replace(Tensors=Tensors, put=put, get=get, scores=scores, values=values, splits_int8=True)
