"""NF4 in kernels. `formats/nf4/reference.py` is the specification."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats.channel_block.jit import Tensors, block_scores, block_values, get_block, put_block
from qattn_kernels.formats.codebook import half_levels_of, levels_of, lookup, words
from qattn_kernels.formats.model_ring.jit import JIT as MODEL_RING
from qattn_kernels.formats.nf4.reference import TOP, integers, midpoints
from qattn_kernels.formats.scale_bits import from_bits, to_bits
from qattn_kernels.jit.rows import block_of

UNIT = tl.constexpr(1 / TOP)
MIDPOINTS = tl.constexpr(midpoints())
WORDS = tl.constexpr(words(integers()))
LOOKUP = tl.constexpr(lookup(integers()))


@triton.jit
def encode(x, SIDE: tl.constexpr):
    """Return int32 codes of fp32 groups `[BLOCK, groups, GROUP]`, and bits of their scales.

    Finds the level by bisection: half of the 16 levels, then half of that half, until one is left."""
    scale = to_bits(tl.max(tl.abs(x), 2))
    whole = tl.broadcast_to(from_bits(scale)[:, :, None], x.shape)
    a = x > whole * MIDPOINTS[7]
    b = x > tl.where(a, whole * MIDPOINTS[11], whole * MIDPOINTS[3])
    c = x > _quarter(a, b, whole, 1)
    d = x > tl.where(c, _quarter(a, b, whole, 2), _quarter(a, b, whole, 0))
    return a.to(tl.int32) * 8 + b.to(tl.int32) * 4 + c.to(tl.int32) * 2 + d.to(tl.int32), scale


@triton.jit
def _quarter(a, b, whole, I: tl.constexpr):
    """Return midpoint `I` of a quarter of the levels. `a`: in the upper half. `b`: in the upper half of that half."""
    upper = tl.where(b, whole * MIDPOINTS[12 + I], whole * MIDPOINTS[8 + I])
    return tl.where(a, upper, tl.where(b, whole * MIDPOINTS[4 + I], whole * MIDPOINTS[I]))


@triton.jit
def levels(code, BITS: tl.constexpr):
    """Return int8 levels of int32 codes, in plain arithmetic."""
    return levels_of(code, WORDS[0], WORDS[1], WORDS[2], WORDS[3])


@triton.jit
def half_levels(x, BITS: tl.constexpr, PLAIN: tl.constexpr):
    """Return int8 levels of the codes in the lower and the upper halves of words."""
    return half_levels_of(x, levels, LOOKUP, BITS, PLAIN)


@triton.jit
def put(S, tokens, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Quantize and store a full block of unquantized tokens."""
    put_block(S, tokens.code, block_of(slot, C), encode, True, SIDE, C)


@triton.jit
def get(S, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Return dequantized tokens `[BLOCK, DP]` of a closed block; the returned scales are zeros and unused."""
    return get_block(S, block_of(slot, C), levels, UNIT, True, SIDE, C)


@triton.jit
def scores(S, at, query, SIDE: tl.constexpr, C: tl.constexpr):
    """Return scores `[BLOCK, Q]` of queries with a block of keys, in `token_order`."""
    return block_scores(S, at.block, query, half_levels, UNIT, at.BITS, SIDE, C)


@triton.jit
def values(S, at, p, acc, alpha, beta, SIDE: tl.constexpr, C: tl.constexpr):
    """Return the accumulator plus the weighted values of a block, and the sum of the weights."""
    return block_values(S, at.block, p, acc, alpha, beta, half_levels, UNIT, at.BITS, SIDE, C)


JIT = MODEL_RING._replace(Tensors=Tensors, put=put, get=get, scores=scores, values=values, splits_int8=True)
