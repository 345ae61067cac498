"""What formats with a scale a token and block of channels share in kernels: `formats/channel_block/reference.py`.

Levels enter the products of a decode as INT8, exact, a block of channels at a time; queries and weights as INT8 pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.packing import read_codes, write_codes
from qattn_kernels.formats.planes import in_half_order, load_planes, quarter_columns, spread_planes
from qattn_kernels.formats.scale_bits import from_bits
from qattn_kernels.jit.math import TINY, inverse_of
from qattn_kernels.jit.split_int8 import SPLIT_TOP, dot_split, join_split, split_weights
from qattn_kernels.jit.tile_order import (
    deinterleave,
    interleave,
    split_columns,
    stack,
    to_part_order,
    to_token_order,
    unstack,
)


class Tensors(NamedTuple):
    """The tensors of one side of a layer that the functions here take, by their names in its state."""

    codes: Any
    scale: Any
    ring: Any


@triton.jit
def _grouped(x, GROUP: tl.constexpr):
    """`[BLOCK, DP]` as `[BLOCK, groups, GROUP]`."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP))


@triton.jit
def restored(scale):
    """fp32 of scales as they are stored: bits in int16, or fp16."""
    if scale.dtype == tl.int16:
        return from_bits(scale)
    else:
        return scale.to(tl.float32)


@triton.jit
def _scale_offsets(at, GROUP: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Offsets `[BLOCK, groups]` of the scales of a block, and their mask; groups cover `DP` channels."""
    COUNT: tl.constexpr = (SIDE.D + GROUP - 1) // GROUP
    g, t = tl.arange(0, SIDE.DP // GROUP), tl.arange(0, C.BLOCK)
    return at * (COUNT * C.BLOCK) + g[None, :] * C.BLOCK + t[:, None], (g < COUNT)[None, :]


@triton.jit
def put_block(S, x, at, ENCODE: tl.constexpr, SHUFFLED: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """A full block `[BLOCK, DP]`, whose tokens come as they are. `ENCODE` makes int32 codes of fp32 groups `[BLOCK,
    groups, GROUP]`, and their scales as they are stored; `SHUFFLED`: see `write_codes`."""
    BITS: tl.constexpr = SIDE.BITS
    GROUP: tl.constexpr = SIDE.CHANNELS
    code, scale = ENCODE(_grouped(x, GROUP), BITS)
    offsets, mask = _scale_offsets(at, GROUP, SIDE, C)
    tl.store(S.scale + offsets, scale, mask=mask)
    write_codes(S.codes, tl.reshape(code, x.shape), at, BITS, SHUFFLED, SIDE, C)


@triton.jit
def get_block(
    S, at, LEVELS: tl.constexpr, UNIT: tl.constexpr, SHUFFLED: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr
):
    """Tokens `[BLOCK, DP]` of a closed block, dequantized; no scales. `LEVELS` makes INT8 levels of int32 codes, which
    count `UNIT` each."""
    BITS: tl.constexpr = SIDE.BITS
    GROUP: tl.constexpr = SIDE.CHANNELS
    level = LEVELS(read_codes(S.codes, at, BITS, SHUFFLED, SIDE, C), BITS).to(tl.float32) * UNIT
    offsets, mask = _scale_offsets(at, GROUP, SIDE, C)
    scale = restored(tl.load(S.scale + offsets, mask=mask, other=0))
    return tl.reshape(_grouped(level, GROUP) * scale[:, :, None], level.shape), tl.full([C.BLOCK], 0, tl.float32)


@triton.jit
def _scales(S, at, g: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Scales fp32 `[BLOCK]` of a block's tokens for group `g` of channels."""
    COUNT: tl.constexpr = (SIDE.D + GROUP - 1) // GROUP
    return restored(tl.load(S.scale + at * (COUNT * C.BLOCK) + g * C.BLOCK + tl.arange(0, C.BLOCK)))


@triton.jit
def _levels(x, HALVES: tl.constexpr, BITS: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """INT8 levels of the two halves of a block's tokens, by `HALVES` of bytes with two codes each: of keys `[BLOCK / 2,
    channels]`, of values `[channels, BLOCK / 2]`, tokens in the order of `half_order`."""
    if BITS == 4:
        return HALVES(x.low, BITS, C.PLAIN)
    else:  # a lookup takes four neighbours in memory: quarters have them side by side, halves need not
        one, other = spread_planes(x, BITS, C)
        first, third = HALVES(one, BITS, C.PLAIN)
        second, fourth = HALVES(other, BITS, C.PLAIN)
        if SIDE.VALUES:
            return quarter_columns(first, second), quarter_columns(third, fourth)
        else:
            return stack(first, second), stack(third, fourth)


@triton.jit
def group_scores(S, at, x, x8, g: tl.constexpr, COUNT: tl.constexpr, HALVES: tl.constexpr, BITS: tl.constexpr,
                 SIDE: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Products `[BLOCK, Q]` of levels and scales with INT8 pairs `x8` of `COUNT` groups of channels from group `g` on.
    `x`: their bytes, of 4 and 8 bits: rows of all groups are read at once, which lie side by side. Of 2 and 3 bits each
    group is read by itself: parts of a row, in two warps, would not have neighbours in one thread, as `_levels` needs
    them."""
    GROUP: tl.constexpr = SIDE.CHANNELS
    if g * GROUP >= SIDE.D:
        return tl.full([C.BLOCK, x8.shape[1] // 2], 0, tl.float32)
    elif COUNT > 1:
        first, second = unstack(x8)
        left, right = split_columns(x) if BITS >= 4 else (x, x)
        one = group_scores(S, at, left, first, g, COUNT // 2, HALVES, BITS, SIDE, C)
        return one + group_scores(S, at, right, second, g + COUNT // 2, COUNT // 2, HALVES, BITS, SIDE, C)
    else:
        if BITS == 8:
            s = join_split(dot_split(x, x8))
        else:
            if BITS == 4:
                lo, hi = HALVES(x, BITS, C.PLAIN)
            else:
                d = g * GROUP + tl.arange(0, GROUP)
                lo, hi = _levels(load_planes(S.codes, at, d, BITS, SIDE, C), HALVES, BITS, SIDE, C)
            s = stack(join_split(dot_split(lo, x8)), join_split(dot_split(hi, x8)))
        return s * to_part_order(_scales(S, at, g, GROUP, SIDE, C), C.PARTS)[:, None]


@triton.jit
def block_scores(
    S, at, query, HALVES: tl.constexpr, UNIT: tl.constexpr, BITS: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr
):
    """Scores `[BLOCK, Q]` of a block of keys, in `token_order`. `HALVES` makes INT8 levels, see `_levels`, which count
    `UNIT` each."""
    x = load_planes(S.codes, at, tl.arange(0, SIDE.DP), BITS, SIDE, C).low if BITS >= 4 else None
    s = group_scores(S, at, x, query.operand, 0, SIDE.DP // SIDE.CHANNELS, HALVES, BITS, SIDE, C)
    return interleave(s, C.PARTS) * (query.scale * UNIT)[None, :]


@triton.jit
def _largest(S, at, g: tl.constexpr, COUNT: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """The largest scale of each token in `COUNT` groups of values from group `g` on."""
    if g * SIDE.CHANNELS >= SIDE.D:
        return tl.full([C.BLOCK], 0, tl.float32)
    elif COUNT > 1:
        return tl.maximum(_largest(S, at, g, COUNT // 2, SIDE, C), _largest(S, at, g + COUNT // 2, COUNT // 2, SIDE, C))
    else:
        return tl.abs(_scales(S, at, g, SIDE.CHANNELS, SIDE, C))


@triton.jit
def group_values(S, at, y, g: tl.constexpr, COUNT: tl.constexpr, HALVES: tl.constexpr, BITS: tl.constexpr,
                 SIDE: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Sums `[COUNT * GROUP, Q]` of levels and scales, weighed by `y` `[BLOCK, Q]` in `token_order`, for `COUNT` groups
    of channels from group `g` on. A scale is multiplied into its token's weight before the weights become INT8
    pairs."""
    GROUP: tl.constexpr = SIDE.CHANNELS
    if g * GROUP >= SIDE.D:
        return tl.full([COUNT * GROUP, y.shape[1]], 0, tl.float32)
    elif COUNT > 1:
        one = group_values(S, at, y, g, COUNT // 2, HALVES, BITS, SIDE, C)
        return stack(one, group_values(S, at, y, g + COUNT // 2, COUNT // 2, HALVES, BITS, SIDE, C))
    else:
        d = g * GROUP + tl.arange(0, GROUP)
        y = deinterleave(y * to_token_order(_scales(S, at, g, GROUP, SIDE, C), C.PARTS)[:, None], C.PARTS)
        x = load_planes(S.codes, at, d, BITS, SIDE, C)
        if BITS == 8:
            o = dot_split(x.low, split_weights(y, C))
        else:
            y_lo, y_hi = unstack(y)
            y_lo, y_hi = in_half_order(y_lo, BITS), in_half_order(y_hi, BITS)
            lo, hi = _levels(x, HALVES, BITS, SIDE, C)
            o = tl.dot(hi, split_weights(y_hi, C), acc=dot_split(lo, split_weights(y_lo, C)), out_dtype=tl.int32)
        return join_split(o)


@triton.jit
def block_values(S, at, p, acc, alpha, beta, HALVES: tl.constexpr, UNIT: tl.constexpr, BITS: tl.constexpr,
                 SIDE: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """The accumulator with the values of a block, and the sum of the weights `p` `[BLOCK, Q]`."""
    COUNT: tl.constexpr = SIDE.DP // SIDE.CHANNELS
    top = tl.maximum(tl.max(p * to_token_order(_largest(S, at, 0, COUNT, SIDE, C), C.PARTS)[:, None], 0), TINY)
    o = group_values(S, at, p * (inverse_of(top) * SPLIT_TOP)[None, :], 0, COUNT, HALVES, BITS, SIDE, C)
    return acc * alpha[None, :] + o * (beta * top * (UNIT / 127.0))[None, :], tl.sum(p, 0)
