"""TurboQuant in kernels. `formats/turboquant/reference.py` is the specification."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats.channel_block.jit import Tensors, block_scores, block_values, get_block, put_block
from qattn_kernels.formats.codebook import half_levels_of, levels_of, lookup, words
from qattn_kernels.formats.lloyd_max import UNIT as LEVEL
from qattn_kernels.formats.lloyd_max import codebook, midpoints
from qattn_kernels.formats.model_ring.jit import JIT as MODEL_RING
from qattn_kernels.formats.scale_bits import to_bits
from qattn_kernels.jit.rows import block_of

UNIT = tl.constexpr(LEVEL)
MIDPOINTS_2, MIDPOINTS_3, MIDPOINTS_4 = (tl.constexpr(tuple(midpoints(bits))) for bits in (2, 3, 4))
WORDS_2, WORDS_3, WORDS_4 = (tl.constexpr(words(codebook(bits))) for bits in (2, 3, 4))
LOOKUP_2, LOOKUP_3, LOOKUP_4 = (tl.constexpr(lookup(codebook(bits))) for bits in (2, 3, 4))


@triton.jit
def levels(code, BITS: tl.constexpr):
    """Return int8 levels of int32 codes, in plain arithmetic."""
    if BITS == 2:
        return levels_of(code, WORDS_2[0], WORDS_2[1], WORDS_2[2], WORDS_2[3])
    elif BITS == 3:
        return levels_of(code, WORDS_3[0], WORDS_3[1], WORDS_3[2], WORDS_3[3])
    else:
        return levels_of(code, WORDS_4[0], WORDS_4[1], WORDS_4[2], WORDS_4[3])


@triton.jit
def half_levels(x, BITS: tl.constexpr, PLAIN: tl.constexpr):
    """Return int8 levels of the codes in the lower and the upper halves of words."""
    if BITS == 2:
        return half_levels_of(x, levels, LOOKUP_2, BITS, PLAIN)
    elif BITS == 3:
        return half_levels_of(x, levels, LOOKUP_3, BITS, PLAIN)
    else:
        return half_levels_of(x, levels, LOOKUP_4, BITS, PLAIN)


@triton.jit
def tree_sum(x):
    """Return the sum over the last of three dimensions, neighbours first, as the reference does."""
    if x.shape[2] == 1:
        return tl.reshape(x, (x.shape[0], x.shape[1]))
    else:
        one, other = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))
        return tree_sum(one + other)


@triton.jit
def _sizes(x, deviation, BITS: tl.constexpr):
    """Return the number of midpoints between positive levels that lie below |x|."""
    if BITS == 2:
        middles: tl.constexpr = MIDPOINTS_2
    elif BITS == 3:
        middles: tl.constexpr = MIDPOINTS_3
    else:
        middles: tl.constexpr = MIDPOINTS_4
    size = tl.zeros(x.shape, tl.int32)
    for i in tl.static_range(2 ** (BITS - 1) - 1):
        size += (tl.abs(x) > deviation * middles[i]).to(tl.int32)
    return size


@triton.jit
def _inside(x, SIDE: tl.constexpr):
    """Return which channels `[1, groups, GROUP]` of groups `x` a token has."""
    g, d = tl.arange(0, x.shape[1])[:, None], tl.arange(0, x.shape[2])[None, :]
    return (g * x.shape[2] + d < SIDE.D)[None, :, :]


@triton.jit
def encode(x, SIDE: tl.constexpr):
    """Return int32 codes of fp32 groups `[BLOCK, groups, GROUP]`, and bits of their scales. Needs
    `enable_fp_fusion=False`."""
    BITS: tl.constexpr = SIDE.BITS
    squares = tree_sum(x * x)
    mean, inside = squares * (1.0 / x.shape[2]), None
    if SIDE.D % SIDE.CHANNELS > 0:  # the last group is short
        inside = _inside(x, SIDE)
        channels = tl.maximum(tl.sum(inside.to(tl.float32), 2), 1.0)
        mean = tl.div_rn(squares, tl.broadcast_to(channels, squares.shape))
    deviation = tl.sqrt_rn(mean)
    size = _sizes(x, tl.broadcast_to(deviation[:, :, None], x.shape), BITS)
    HALF: tl.constexpr = 2 ** (BITS - 1)
    code = tl.where(x < 0.0, HALF - 1 - size, HALF + size)
    level = levels(code, BITS).to(tl.float32)
    if inside is not None:
        level = tl.where(inside | (squares == 0.0)[:, :, None], level, 0.0)  # not all, as the norm is a divisor
    scale = tl.sqrt_rn(tl.div_rn(squares, tl.sum(level * level, 2))) * (1.0 / UNIT)
    return code, to_bits(scale)


@triton.jit
def put(S, tokens, slot, SIDE: tl.constexpr, C: tl.constexpr):
    put_block(S, tokens.code, block_of(slot, C), encode, True, SIDE, C)


@triton.jit
def get(S, slot, SIDE: tl.constexpr, C: tl.constexpr):
    return get_block(S, block_of(slot, C), levels, UNIT, True, SIDE, C)


@triton.jit
def scores(S, at, query, SIDE: tl.constexpr, C: tl.constexpr):
    return block_scores(S, at.block, query, half_levels, UNIT, at.BITS, SIDE, C)


@triton.jit
def values(S, at, p, acc, alpha, beta, SIDE: tl.constexpr, C: tl.constexpr):
    return block_values(S, at.block, p, acc, alpha, beta, half_levels, UNIT, at.BITS, SIDE, C)


JIT = MODEL_RING._replace(Tensors=Tensors, put=put, get=get, scores=scores, values=values, splits_int8=True)
