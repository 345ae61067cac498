"""INT8 values with one scale per block, in kernels. `formats/int8_block/reference.py` is the specification.

A decode multiplies weights as INT8 pairs, which are more precise than the specification's INT8. It therefore does not
matter whether a row sum uses rounded weights. Open values are unquantized."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.int8.jit import LEVELS, addresses, quantize_to
from qattn_kernels.formats.model_ring.jit import JIT as MODEL_RING
from qattn_kernels.jit.math import float_to_int8
from qattn_kernels.jit.rows import block_of
from qattn_kernels.jit.split_int8 import SPLIT_TOP, dot_split, join_split, split_weights
from qattn_kernels.jit.tile_order import deinterleave


class Tensors(NamedTuple):
    """State tensors of one side, by their names in the state."""

    codes: Any
    scale: Any
    ring: Any


@triton.jit
def block_form(code, scale, keep):
    """Quantize a full or unfinished block to INT8 with one scale."""
    return quantize_to(code, tl.zeros_like(scale) + tl.max(tl.max(tl.abs(code), 1), 0), LEVELS)


@triton.jit
def put(S, tokens, slot, SIDE: tl.constexpr, C: tl.constexpr):
    at = block_of(slot, C)
    inside = tl.arange(0, SIDE.DP) < SIDE.D
    tl.store(addresses(S.codes, at, tokens.t, SIDE, C), float_to_int8(tokens.code), mask=inside[None, :])
    tl.store(S.scale + at, tl.max(tokens.scale, 0))


@triton.jit
def get(S, slot, SIDE: tl.constexpr, C: tl.constexpr):
    at = block_of(slot, C)
    t, inside = tl.arange(0, C.BLOCK), tl.arange(0, SIDE.DP) < SIDE.D
    code = tl.load(addresses(S.codes, at, t, SIDE, C), mask=inside[None, :], other=0)
    return code, tl.load(S.scale + at) + tl.full([C.BLOCK], 0, tl.float32)


@triton.jit
def values(S, at, p, acc, alpha, beta, SIDE: tl.constexpr, C: tl.constexpr):
    """Add a block of values. Its largest weight is 1, so weights times 127 fit INT8."""
    t, d = tl.arange(0, C.BLOCK), tl.arange(0, SIDE.DP)
    codes = S.codes + at.block * (C.BLOCK * SIDE.D) + d[:, None] * C.BLOCK + t[None, :]
    v = tl.load(codes, mask=(d < SIDE.D)[:, None], other=0)
    scale = tl.load(S.scale + at.block)
    if C.N > C.Q:
        o = join_split(dot_split(v, split_weights(deinterleave(p * SPLIT_TOP, C.PARTS), C)))
        scale *= 1.0 / 127.0
    else:
        o = tl.dot(v.to(tl.float16), deinterleave(p, C.PARTS).to(tl.float16))
    return acc * alpha[None, :] + o * (beta * scale)[None, :], tl.sum(p, 0)


JIT = MODEL_RING._replace(
    Tensors=Tensors, block_form=block_form, put=put, get=get, values=values, scores=None, ring_scores=None
)
