"""Unquantized keys or values in kernels. `formats/model/reference.py` is the specification."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.int8.jit import JIT as INT8
from qattn_kernels.jit.rows import block_of
from qattn_kernels.jit.split_int8 import repeated_columns, unrepeated_columns
from qattn_kernels.jit.tile_order import deinterleave, token_order


class Tensors(NamedTuple):
    """State tensors of one side, by their names in the state."""

    x: Any


@triton.jit
def quantize_tokens(x):
    return x, tl.zeros([x.shape[0]], tl.float32)


@triton.jit
def _tokens(x, t, SIDE: tl.constexpr):
    d = tl.arange(0, SIDE.DP)
    return tl.load(x + t[:, None] * SIDE.D + d[None, :], mask=(d < SIDE.D)[None, :], other=0.0)


@triton.jit
def put(S, tokens, slot, SIDE: tl.constexpr, C: tl.constexpr):
    at = block_of(slot, C)
    d = tl.arange(0, SIDE.DP)
    addresses = S.x + at * (C.BLOCK * SIDE.D) + tokens.t[:, None] * SIDE.D + d[None, :]
    tl.store(addresses, tokens.code.to(S.x.dtype.element_ty), mask=tokens.write[:, None] & (d < SIDE.D)[None, :])


@triton.jit
def get(S, slot, SIDE: tl.constexpr, C: tl.constexpr):
    at = block_of(slot, C)
    x = _tokens(S.x + at * (C.BLOCK * SIDE.D), tl.arange(0, C.BLOCK), SIDE)
    return x, tl.full([C.BLOCK], 0, tl.float32)


@triton.jit
def _product(a, b, C: tl.constexpr):
    """Multiply `a` with the columns `[n, Q]` of `b`, exactly. Only tensor cores need eight columns, and
    products of fp32 run without them."""
    if b.dtype == tl.float32:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return unrepeated_columns(tl.dot(a, repeated_columns(b, C)), C)


@triton.jit
def token_scores(x, TOKENS: tl.constexpr, PARTS: tl.constexpr, query, SIDE: tl.constexpr, C: tl.constexpr):
    """Return scores `[TOKENS, Q]`, in `token_order`, of consecutive keys."""
    k = _tokens(x, token_order(TOKENS, PARTS), SIDE)
    return _product(k, query.raw.to(k.dtype), C) * query.raw_scale


@triton.jit
def token_values(
    x, TOKENS: tl.constexpr, PARTS: tl.constexpr, p, acc, alpha, beta, SIDE: tl.constexpr, C: tl.constexpr
):
    """Add values stored `[tokens, D]`, as keys are. Returns the accumulator and the sum of the weights.

    Weights `p` `[TOKENS, Q]` are in `token_order`."""
    v = tl.trans(_tokens(x, tl.arange(0, TOKENS), SIDE))
    o = _product(v, deinterleave(p, PARTS).to(v.dtype), C)
    return acc * alpha[None, :] + o * beta[None, :], tl.sum(p, 0)


@triton.jit
def scores(S, at, query, SIDE: tl.constexpr, C: tl.constexpr):
    return token_scores(S.x + at.block * (C.BLOCK * SIDE.D), C.BLOCK, C.PARTS, query, SIDE, C)


@triton.jit
def values(S, at, p, acc, alpha, beta, SIDE: tl.constexpr, C: tl.constexpr):
    return token_values(S.x + at.block * (C.BLOCK * SIDE.D), C.BLOCK, C.PARTS, p, acc, alpha, beta, SIDE, C)


JIT = INT8._replace(Tensors=Tensors, quantize_tokens=quantize_tokens, put=put, get=get, scores=scores, values=values)
