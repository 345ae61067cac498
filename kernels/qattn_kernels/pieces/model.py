"""Model precision in kernels: `stores/model.py` is the specification."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.jit import own_columns, whole_columns
from qattn_kernels.pieces.int8 import locate as locate  # tokens stand where they came, as there
from qattn_kernels.pieces.int8 import place as place
from qattn_kernels.pieces.int8 import seen as seen


class Tensors(NamedTuple):
    """Of one side of a layer, by the names of its state."""

    x: Any


@triton.jit
def open(x):
    return x, tl.zeros([x.shape[0]], tl.float32)


@triton.jit
def _tokens(x, t, C: tl.constexpr):
    d = tl.arange(0, C.DP)
    return tl.load(x + t[:, None] * C.D + d[None, :], mask=(d < C.D)[None, :], other=0.0)


@triton.jit
def put(S, code, scale, keep, write, t, b, h, index, NB, place, VALUES: tl.constexpr, C: tl.constexpr):
    at = (b * C.H + h).to(tl.int64) * NB + index
    d = tl.arange(0, C.DP)
    where = S.x + at * (C.BLOCK * C.D) + t[:, None] * C.D + d[None, :]
    tl.store(where, code.to(S.x.dtype.element_ty), mask=write[:, None] & (d < C.D)[None, :])


@triton.jit
def get(S, b, h, index, NB, place, VALUES: tl.constexpr, C: tl.constexpr):
    at = (b * C.H + h).to(tl.int64) * NB + index
    x = _tokens(S.x + at * (C.BLOCK * C.D), tl.arange(0, C.BLOCK), C)
    return x, tl.full([C.BLOCK], 0, tl.float32)


@triton.jit
def pair_scores(x, HALF: tl.constexpr, query, query_scale, C: tl.constexpr):
    """Scores of two half tiles of keys that lie one after the other."""
    t = tl.arange(0, HALF)
    lo, hi = _tokens(x, t, C), _tokens(x, t + HALF, C)
    q = whole_columns(query[0].to(lo.dtype), C)
    s_lo = own_columns(tl.dot(lo, q, input_precision="ieee"), C) * query_scale
    s_hi = own_columns(tl.dot(hi, q, input_precision="ieee"), C) * query_scale
    return s_lo, s_hi


@triton.jit
def joint_values(lo, hi, p_lo, p_hi, acc, alpha, beta, C: tl.constexpr):
    """The same for values, `[DP, HALF]`."""
    o = tl.dot(lo, whole_columns(p_lo.to(lo.dtype), C), input_precision="ieee")
    o = tl.dot(hi, whole_columns(p_hi.to(hi.dtype), C), acc=o, input_precision="ieee")
    return acc * alpha[None, :] + own_columns(o, C) * beta[None, :], tl.sum(p_lo + p_hi, 0)


@triton.jit
def pair_values(x, HALF: tl.constexpr, p_lo, p_hi, acc, alpha, beta, C: tl.constexpr):
    """The same for values that lie as keys do."""
    t = tl.arange(0, HALF)
    lo, hi = tl.trans(_tokens(x, t, C)), tl.trans(_tokens(x, t + HALF, C))
    return joint_values(lo, hi, p_lo, p_hi, acc, alpha, beta, C)


@triton.jit
def scores(S, at, place_at, place, query, query_scale, C: tl.constexpr):
    return pair_scores(S.x + at * (C.BLOCK * C.D), C.BLOCK // 2, query, query_scale, C)


@triton.jit
def values(S, at, place_at, place, p_lo, p_hi, acc, alpha, beta, dtype: tl.constexpr, C: tl.constexpr):
    return pair_values(S.x + at * (C.BLOCK * C.D), C.BLOCK // 2, p_lo, p_hi, acc, alpha, beta, C)
