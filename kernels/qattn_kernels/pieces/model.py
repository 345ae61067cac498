"""Model precision in kernels: `stores/model.py` is the specification."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.pieces.int8 import locate as locate  # tokens stand where they came, as there
from qattn_kernels.pieces.int8 import place as place
from qattn_kernels.pieces.int8 import seen as seen

TENSORS = ("x",)


@triton.jit
def open(x):
    return x, tl.zeros([x.shape[0]], tl.float32)


@triton.jit
def _tokens(x, at, t, C: tl.constexpr):
    d = tl.arange(0, C.DP)
    return tl.load(x + at * (C.BLOCK * C.D) + t[:, None] * C.D + d[None, :], mask=(d < C.D)[None, :], other=0.0)


@triton.jit
def put(S, code, scale, keep, write, t, b, h, index, NB, place, VALUES: tl.constexpr, C: tl.constexpr):
    at = (b * C.H + h).to(tl.int64) * NB + index
    d = tl.arange(0, C.DP)
    where = S[0] + at * (C.BLOCK * C.D) + t[:, None] * C.D + d[None, :]
    tl.store(where, code.to(S[0].dtype.element_ty), mask=write[:, None] & (d < C.D)[None, :])


@triton.jit
def get(S, b, h, index, NB, place, VALUES: tl.constexpr, C: tl.constexpr):
    at = (b * C.H + h).to(tl.int64) * NB + index
    return _tokens(S[0], at, tl.arange(0, C.BLOCK), C), tl.full([C.BLOCK], 0, tl.float32)


@triton.jit
def scores(S, at, place_at, place, query, query_scale, C: tl.constexpr):
    t = tl.arange(0, C.BLOCK // 2)
    lo, hi = _tokens(S[0], at, t, C), _tokens(S[0], at, t + C.BLOCK // 2, C)
    q = query[0].to(lo.dtype)
    return tl.dot(lo, q, input_precision="ieee") * query_scale, tl.dot(hi, q, input_precision="ieee") * query_scale


@triton.jit
def values(S, at, place_at, place, p_lo, p_hi, acc, alpha, beta, dtype: tl.constexpr, C: tl.constexpr):
    t = tl.arange(0, C.BLOCK // 2)
    lo, hi = _tokens(S[0], at, t, C), _tokens(S[0], at, t + C.BLOCK // 2, C)
    o = tl.dot(tl.trans(lo), p_lo.to(lo.dtype), input_precision="ieee")
    o = tl.dot(tl.trans(hi), p_hi.to(hi.dtype), acc=o, input_precision="ieee")
    return acc * alpha[None, :] + o * beta[None, :], tl.sum(p_lo + p_hi, 0)
