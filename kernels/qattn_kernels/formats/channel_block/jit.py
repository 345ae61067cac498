"""Formats with one scale per token and block of channels, in kernels; see `formats/channel_block/reference.py`.

Levels enter the products of a decode as exact INT8, one block of channels at a time. Queries and weights enter as INT8
pairs."""

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
    """State tensors of one side, by their names in the state."""

    codes: Any
    scale: Any
    ring: Any


@triton.jit
def _grouped(x, GROUP: tl.constexpr):
    """Reshape `[BLOCK, DP]` to `[BLOCK, groups, GROUP]`."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // GROUP, GROUP))


@triton.jit
def restored(scale):
    """Return fp32 scales from stored ones: bits in int16, or fp16."""
    if scale.dtype == tl.int16:
        return from_bits(scale)
    else:
        return scale.to(tl.float32)


@triton.jit
def _scale_offsets(at, GROUP: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Return offsets `[BLOCK, groups]` of the scales of a block, and their mask; groups cover `DP` channels."""
    COUNT: tl.constexpr = (SIDE.D + GROUP - 1) // GROUP
    g, t = tl.arange(0, SIDE.DP // GROUP), tl.arange(0, C.BLOCK)
    return at * (COUNT * C.BLOCK) + g[None, :] * C.BLOCK + t[:, None], (g < COUNT)[None, :]


@triton.jit
def put_block(S, x, at, ENCODE: tl.constexpr, SHUFFLED: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Quantize and store a full block `[BLOCK, DP]` of unquantized tokens.

    `ENCODE` turns fp32 groups `[BLOCK, groups, GROUP]` of a `SIDE` into int32 codes and stored scales. `SHUFFLED`: see
    `write_codes`."""
    BITS: tl.constexpr = SIDE.BITS
    GROUP: tl.constexpr = SIDE.CHANNELS
    code, scale = ENCODE(_grouped(x, GROUP), SIDE)
    offsets, mask = _scale_offsets(at, GROUP, SIDE, C)
    tl.store(S.scale + offsets, scale, mask=mask)
    write_codes(S.codes, tl.reshape(code, x.shape), at, BITS, SHUFFLED, SIDE, C)


@triton.jit
def get_block(
    S, at, LEVELS: tl.constexpr, UNIT: tl.constexpr, SHUFFLED: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr
):
    """Return dequantized tokens `[BLOCK, DP]` of a closed block; the returned scales are zeros and unused.

    `LEVELS` turns int32 codes into INT8 levels in units of `UNIT`."""
    BITS: tl.constexpr = SIDE.BITS
    GROUP: tl.constexpr = SIDE.CHANNELS
    level = LEVELS(read_codes(S.codes, at, BITS, SHUFFLED, SIDE, C), BITS).to(tl.float32) * UNIT
    offsets, mask = _scale_offsets(at, GROUP, SIDE, C)
    scale = restored(tl.load(S.scale + offsets, mask=mask, other=0))
    return tl.reshape(_grouped(level, GROUP) * scale[:, :, None], level.shape), tl.full([C.BLOCK], 0, tl.float32)


@triton.jit
def _scales(S, at, g: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Return scales fp32 `[BLOCK]` of a block's tokens for channel group `g`."""
    COUNT: tl.constexpr = (SIDE.D + GROUP - 1) // GROUP
    return restored(tl.load(S.scale + at * (COUNT * C.BLOCK) + g * C.BLOCK + tl.arange(0, C.BLOCK)))


@triton.jit
def _levels(x, HALVES: tl.constexpr, BITS: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Return INT8 levels of both halves of a block's tokens, from bytes with two codes each, by `HALVES`.

    Keys: `[BLOCK / 2, channels]`. Values: `[channels, BLOCK / 2]`, tokens in `half_order`."""
    if BITS == 4:
        return HALVES(x.low, BITS, C.PLAIN)
    else:  # a lookup needs four neighbours in memory, which quarters always have side by side and halves may not
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
    """Return products `[BLOCK, Q]` of levels and scales with INT8 pairs `x8`.

    Covers `COUNT` channel groups from group `g` on. `x`: with 4 and 8 bits, the bytes of these groups, loaded at once
    for all groups because their rows are adjacent. With 2 and 3 bits each group is loaded separately: `_levels` needs
    neighbours in one thread, but parts of a row would be in two warps."""
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
    """Return scores `[BLOCK, Q]` of a block of keys, in `token_order`. `HALVES` yields INT8 levels in units of `UNIT`.

    See `_levels` for `HALVES`."""
    x = load_planes(S.codes, at, tl.arange(0, SIDE.DP), BITS, SIDE, C).low if BITS >= 4 else None
    s = group_scores(S, at, x, query.operand, 0, SIDE.DP // SIDE.CHANNELS, HALVES, BITS, SIDE, C)
    return interleave(s, C.PARTS) * (query.scale * UNIT)[None, :]


@triton.jit
def _largest(S, at, g: tl.constexpr, COUNT: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Return each token's largest scale in `COUNT` groups of values from group `g` on."""
    if g * SIDE.CHANNELS >= SIDE.D:
        return tl.full([C.BLOCK], 0, tl.float32)
    elif COUNT > 1:
        return tl.maximum(_largest(S, at, g, COUNT // 2, SIDE, C), _largest(S, at, g + COUNT // 2, COUNT // 2, SIDE, C))
    else:
        return tl.abs(_scales(S, at, g, SIDE.CHANNELS, SIDE, C))


@triton.jit
def group_values(S, at, y, g: tl.constexpr, COUNT: tl.constexpr, HALVES: tl.constexpr, BITS: tl.constexpr,
                 SIDE: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Return sums `[COUNT * GROUP, Q]` of levels and scales, weighted by `y` `[BLOCK, Q]` in `token_order`.

    Covers `COUNT` channel groups from group `g` on. A weight is multiplied by its token's scale before the weights
    become INT8 pairs."""
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
    """Return the accumulator plus the weighted values of a block, and the sum of the weights `p` `[BLOCK, Q]`."""
    COUNT: tl.constexpr = SIDE.DP // SIDE.CHANNELS
    top = tl.maximum(tl.max(p * to_token_order(_largest(S, at, 0, COUNT, SIDE, C), C.PARTS)[:, None], 0), TINY)
    o = group_values(S, at, p * (inverse_of(top) * SPLIT_TOP)[None, :], 0, COUNT, HALVES, BITS, SIDE, C)
    return acc * alpha[None, :] + o * (beta * top * (UNIT / 127.0))[None, :], tl.sum(p, 0)
