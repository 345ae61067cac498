"""KIVI in kernels. `formats/kivi/reference.py` is the specification.

A group of tokens is a block, and a group of channels has the same size.

Codes enter the products of a decode as exact integers, for every model dtype. Queries and weights enter as INT8 pairs,
which are more precise than bf16."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.kivi import reference
from qattn_kernels.formats.kivi.small_groups import largest_query, tile_scores, tile_values, write_strided
from qattn_kernels.formats.model_ring.jit import JIT as MODEL_RING
from qattn_kernels.formats.packing import code_scores, code_values, half_values, read_codes, write_codes
from qattn_kernels.formats.planes import half_order, in_half_order
from qattn_kernels.jit.math import TINY, divide, inverse_of, range_of_channels, round_even
from qattn_kernels.jit.rows import block_of
from qattn_kernels.jit.split_int8 import SPLIT_TOP, repeated_columns, split_neighbours, unrepeated_columns
from qattn_kernels.jit.tile_order import deinterleave, stack, to_token_order, unstack, unstrided

LARGEST = tl.constexpr(65504.0)  # largest fp16 number
# Limit of the distance from the zero point: beyond all codes, and small enough that no quotient overflows.
FARTHEST = tl.constexpr(1e30)
# constants of compensation, see `reference.py`
TOGETHER = tl.constexpr(reference.TOGETHER)
STEP_PARTS, LARGEST_LEFT = tl.constexpr(reference.STEP_PARTS), tl.constexpr(reference.LARGEST_LEFT)
SHARE_PARTS, LARGEST_SHARE = tl.constexpr(reference.SHARE_PARTS), tl.constexpr(reference.LARGEST_SHARE)


class Tensors(NamedTuple):
    """State tensors of one side, by their names in the state."""

    codes: Any
    scale: Any
    zero_point: Any
    compensation: Any
    ring: Any


@triton.jit
def _asymmetric(low, high, BITS: tl.constexpr, CLIP: tl.constexpr):
    """Return fp16 scale and zero point for fp32 values from `low` to `high`.

    `CLIP` sixteenths of half a step are cut off at both ends."""
    low, high = tl.clamp(low, -LARGEST, LARGEST), tl.clamp(high, -LARGEST, LARGEST)
    scale = tl.div_rn(high - low, tl.full(low.shape, 2**BITS - 1 + CLIP / 16, tl.float32))
    zero_point = low + scale * (CLIP / 32) if CLIP else low
    return scale.to(tl.float16), zero_point.to(tl.float16)


@triton.jit
def _encode(x, scale, zero_point, BITS: tl.constexpr):
    """Return int32 codes of fp32 `x`, for fp16 scale and zero point; 0 where the scale is 0."""
    scale, zero_point = scale.to(tl.float32), zero_point.to(tl.float32)
    x = tl.clamp(x - zero_point, -FARTHEST, FARTHEST)
    code = round_even(tl.clamp(divide(x, tl.where(scale == 0.0, 1.0, scale)), 0.0, 2.0**BITS - 1))
    return tl.where(scale == 0.0, 0.0, code).to(tl.int32)


@triton.jit
def _shares(S, step, inverse, first, h, SIDE: tl.constexpr):
    """Return the fp16 matrix `[DP, TOGETHER]` that multiplies errors and remainders for the channels from `first` on.

    It holds negative shares of the errors of channels before `first`, and 1 where a channel meets itself."""
    i, j = tl.arange(0, SIDE.DP)[:, None], first + tl.arange(0, TOGETHER)[None, :]
    own = tl.sum(tl.where(i == j, inverse[:, None], 0.0), 0)[None, :]  # sum of one number and zeros
    at = S.compensation + h * SIDE.D * SIDE.D + j * SIDE.D + i
    share = tl.load(at, mask=(i < first) & (j < SIDE.D), other=0.0).to(tl.float32) * step[:, None] * own * SHARE_PARTS
    share = round_even(tl.clamp(share, -LARGEST_SHARE, LARGEST_SHARE))
    return tl.where(i == j, 1.0 * SHARE_PARTS, -share).to(tl.float16)


@triton.jit
def _put_compensated(S, x, step, zero_point, at, h, BITS: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Quantize and store fp32 keys `[BLOCK, DP]` with compensated errors, see `encode_compensated`."""
    d, step = tl.arange(0, SIDE.DP), step.to(tl.float32)
    inverse = tl.div_rn(tl.where(step == 0.0, 0.0, 1.0), tl.where(step == 0.0, 1.0, step))
    left = (x - zero_point.to(tl.float32)[None, :]) * inverse[None, :] * STEP_PARTS
    left = round_even(tl.clamp(left, -LARGEST_LEFT, LARGEST_LEFT)).to(tl.float16)
    for first in range(0, SIDE.D, TOGETHER):
        own = tl.dot(left, _shares(S, step, inverse, first, h, SIDE)) * (1.0 / SHARE_PARTS)
        code = tl.clamp(round_even(own * (1.0 / STEP_PARTS)), 0.0, 2.0**BITS - 1)
        error = round_even(tl.clamp(own - code * STEP_PARTS, -STEP_PARTS, STEP_PARTS)).to(tl.float16)
        spread = tl.broadcast_to(error[:, None, :], (C.BLOCK, SIDE.DP // TOGETHER, TOGETHER))
        here = (d >= first) & (d < first + TOGETHER)
        left = tl.where(here[None, :], tl.reshape(spread, left.shape), left)  # errors replace the remainders
        write_codes(S.codes, code.to(tl.int32), at, BITS, False, SIDE, C, first)


@triton.jit
def _scale_offsets(at, SIDE: tl.constexpr, C: tl.constexpr):
    """Return offsets `[BLOCK, groups]` of the values' scales and zero points, and their mask; groups cover `DP`
    channels."""
    g, t = tl.arange(0, SIDE.DP // min(C.BLOCK, SIDE.DP)), tl.arange(0, C.BLOCK)
    COUNT: tl.constexpr = (SIDE.D + C.BLOCK - 1) // C.BLOCK
    return at * (COUNT * C.BLOCK) + g[None, :] * C.BLOCK + t[:, None], (g < COUNT)[None, :]


@triton.jit
def _by_group(x, SIDE: tl.constexpr, C: tl.constexpr):
    """Reshape `[BLOCK, DP]` to `[BLOCK, groups, channels]`."""
    GROUP: tl.constexpr = min(C.BLOCK, SIDE.DP)
    return tl.reshape(x, (C.BLOCK, SIDE.DP // GROUP, GROUP))


@triton.jit
def put(S, tokens, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Quantize and store a full block of unquantized tokens."""
    at = block_of(slot, C)
    d = tl.arange(0, SIDE.DP)
    if SIDE.VALUES:
        x, inside = (
            _by_group(tokens.code, SIDE, C),
            _by_group(tl.broadcast_to((d < SIDE.D)[None, :], tokens.code.shape), SIDE, C),
        )
        low, high = tl.min(tl.where(inside, x, float("inf")), 2), tl.max(tl.where(inside, x, float("-inf")), 2)
        offsets, mask = _scale_offsets(at, SIDE, C)
        scale, zero_point = _asymmetric(tl.where(mask, low, 0.0), tl.where(mask, high, 0.0), SIDE.BITS, SIDE.CLIP)
        tl.store(S.scale + offsets, scale, mask=mask)
        tl.store(S.zero_point + offsets, zero_point, mask=mask)
        coded = tl.reshape(_encode(x, scale[:, :, None], zero_point[:, :, None], SIDE.BITS), tokens.code.shape)
        if SIDE.STRIDED:
            write_strided(S.codes, coded, at, SIDE.BITS, SIDE, C)
        else:
            write_codes(S.codes, coded, at, SIDE.BITS, False, SIDE, C)
    else:
        some = tl.max(tokens.keep.to(tl.int32), 0) > 0
        low, high = range_of_channels(tokens.code, tokens.keep)
        low, high = tl.where(some, low, 0.0), tl.where(some, high, 0.0)
        scale, zero_point = _asymmetric(low, high, SIDE.BITS, SIDE.CLIP)
        tl.store(S.scale + at * SIDE.D + d, scale, mask=d < SIDE.D)
        tl.store(S.zero_point + at * SIDE.D + d, zero_point, mask=d < SIDE.D)
        if SIDE.COMPENSATES:
            _put_compensated(S, tokens.code, scale, zero_point, at, slot.h, SIDE.BITS, SIDE, C)
        else:
            coded = _encode(tokens.code, scale[None, :], zero_point[None, :], SIDE.BITS)
            write_codes(S.codes, coded, at, SIDE.BITS, False, SIDE, C)


@triton.jit
def get(S, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Return dequantized tokens `[BLOCK, DP]` of a closed block; the returned scales are zeros and unused."""
    at = block_of(slot, C)
    if SIDE.VALUES:
        code = read_codes(S.codes, at, SIDE.BITS, False, SIDE, C).to(tl.float32)
        if SIDE.STRIDED:
            code = unstrided(code)
        offsets, mask = _scale_offsets(at, SIDE, C)
        scale = tl.load(S.scale + offsets, mask=mask, other=0.0).to(tl.float32)
        zero_point = tl.load(S.zero_point + offsets, mask=mask, other=0.0).to(tl.float32)
        x = tl.reshape(_by_group(code, SIDE, C) * scale[:, :, None] + zero_point[:, :, None], code.shape)
    else:
        scale, zero_point = _channels(S, at, SIDE)
        x = read_codes(S.codes, at, SIDE.BITS, False, SIDE, C).to(tl.float32) * scale[None, :] + zero_point[None, :]
    return x, tl.full([C.BLOCK], 0, tl.float32)


@triton.jit
def _channels(S, at, SIDE: tl.constexpr):
    """Return fp32 scale and zero point `[DP]` of the key channels of block `at`."""
    d = tl.arange(0, SIDE.DP)
    scale = tl.load(S.scale + at * SIDE.D + d, mask=d < SIDE.D, other=0.0).to(tl.float32)
    return scale, tl.load(S.zero_point + at * SIDE.D + d, mask=d < SIDE.D, other=0.0).to(tl.float32)


@triton.jit
def scores(S, at, query, SIDE: tl.constexpr, C: tl.constexpr):
    """Multiply queries with a block of keys. Channel scales multiply the query; zero points go into a separate sum."""
    if C.TILE > 1:
        return tile_scores(S, at, query, SIDE, C)
    else:
        scale, zero_point = _channels(S, at.block, SIDE)
        top = largest_query(query.scaled, scale)
        x8 = split_neighbours(query.scaled * scale[:, None] * (inverse_of(top) * SPLIT_TOP)[None, :], C)
        zero_point_sum = tl.sum(query.scaled * zero_point[:, None], 0)[None, :]
        return code_scores(S.codes, at.block, x8, at.BITS, SIDE, C) * (top * (1.0 / 127.0))[None, :] + zero_point_sum


@triton.jit
def values(S, at, p, acc, alpha, beta, SIDE: tl.constexpr, C: tl.constexpr):
    """Add a block of values, as `formats.contract.JitFormat.values`.

    A token's scale multiplies its weight, separately for each group of channels. Two cases are dequantized instead:
    3-bit values in small groups, and head dimensions without a tile."""
    if SIDE.STRIDED:
        o = tile_values(S, at.block if C.TILE > 1 else at.block + tl.arange(0, 1), p, at.BITS, SIDE, C)
    elif (C.BLOCK >= SIDE.D) and (C.BLOCK >= 64):
        t = at.block * C.BLOCK + tl.arange(0, C.BLOCK)
        w = p * to_token_order(tl.load(S.scale + t).to(tl.float32), C.PARTS)[:, None]
        zero_point_sum = tl.sum(p * to_token_order(tl.load(S.zero_point + t).to(tl.float32), C.PARTS)[:, None], 0)
        top = tl.maximum(tl.max(w, 0), TINY)
        o = code_values(S.codes, at.block, w * (inverse_of(top) * SPLIT_TOP)[None, :], at.BITS, SIDE, C)
        o = o * (top * (1.0 / 127.0))[None, :] + zero_point_sum[None, :]
    else:
        lo, hi = half_values(S.codes, at.block, at.BITS, SIDE, C)
        p_lo, p_hi = unstack(deinterleave(p, C.PARTS).to(tl.float16))
        p_lo, p_hi = in_half_order(p_lo, at.BITS), in_half_order(p_hi, at.BITS)
        HALF: tl.constexpr = C.BLOCK // 2
        k = tl.arange(0, HALF)
        if HALF < 32:  # Triton 3.6 gives the joined tile a layout for 32 tokens; with 16 the sums were wrong
            x = tl.reshape(tl.permute(tl.join(lo, hi), (0, 2, 1)), (SIDE.DP, C.BLOCK))
            p_all = repeated_columns(stack(p_lo, p_hi), C)
            o = tl.dot(_dequantize(S, x, at.block, tl.arange(0, C.BLOCK), at.BITS, SIDE, C), p_all)
        else:
            o = tl.dot(_dequantize(S, lo, at.block, k, at.BITS, SIDE, C), repeated_columns(p_lo, C))
            o = tl.dot(_dequantize(S, hi, at.block, HALF + k, at.BITS, SIDE, C), repeated_columns(p_hi, C), acc=o)
        o = unrepeated_columns(o, C)
    return acc * alpha[None, :] + o * beta[None, :], tl.sum(p, 0)


@triton.jit
def _dequantize(S, code, at, k, BITS: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Return values `[DP, n]` of columns `k` of the codes of `half_values`, in fp16, the dtype of their scales."""
    HALF: tl.constexpr = C.BLOCK // 2
    GROUP: tl.constexpr = min(C.BLOCK, SIDE.DP)
    COUNT: tl.constexpr = (SIDE.D + C.BLOCK - 1) // C.BLOCK
    g, t = tl.arange(0, SIDE.DP // GROUP), half_order(k, HALF, BITS)
    offsets, mask = at * (COUNT * C.BLOCK) + g[:, None] * C.BLOCK + t[None, :], (g < COUNT)[:, None]
    scale = tl.load(S.scale + offsets, mask=mask, other=0.0).to(tl.float32)
    zero_point = tl.load(S.zero_point + offsets, mask=mask, other=0.0).to(tl.float32)
    if BITS == 2:
        scale *= tl.where(t % HALF < HALF // 2, 1.0, 0.25)[None, :]  # see `half_values`
    x = tl.reshape(code.to(tl.float32), (SIDE.DP // GROUP, GROUP, code.shape[1])) * scale[:, None, :]
    return tl.reshape(x + zero_point[:, None, :], code.shape).to(tl.float16)


def absent(fmt: Any, heads: int) -> dict[str, Any]:
    """Return placeholders for tensors missing from the state: `compensation`, if errors are not compensated."""
    return {} if fmt.compensate else {"compensation": None}


JIT = MODEL_RING._replace(
    Tensors=Tensors, put=put, get=get, scores=scores, values=values, splits_int8=True, head_numbers=absent
)
