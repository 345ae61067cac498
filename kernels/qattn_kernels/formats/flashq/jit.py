"""FlashQ in kernels. `formats/flashq/reference.py` is the specification."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.flashq.reference import FlashQFormat
from qattn_kernels.formats.flashq.second_stage import (
    LEVELS,
    block_scale,
    close,
    codes_of,
    put_codes,
    width_and_index,
    x1_of,
)
from qattn_kernels.formats.head_bits import ALL, LISTED, NONE, RANKED, number, unspecialized
from qattn_kernels.formats.int8.jit import quantize, token_values
from qattn_kernels.formats.int8_ring.jit import JIT as INT8_RING
from qattn_kernels.formats.packing import code_scores, code_values, read_codes
from qattn_kernels.jit.rows import block_of
from qattn_kernels.jit.split_int8 import SPLIT_TOP, split_neighbours


class Tensors(NamedTuple):
    """State tensors of one side, plus three integers encoded for `head_bits.number`.

    Attributes:
        low: number of heads with 2 bits.
        mask: bit mask of the 2-bit heads in a recipe's list.
        aged: number of a row's first blocks that have half the bits of the others.
    """

    codes8: Any
    codes4: Any
    codes2: Any
    head_of: Any
    channel_scale: Any
    zero_point: Any
    scale: Any
    ring: Any
    ring_scale: Any
    low: Any
    mask: Any
    aged: Any


@lru_cache(maxsize=1024)
def head_numbers(fmt: FlashQFormat, heads: int) -> dict[str, int]:
    """Return `low`, `mask` and `aged` of `Tensors`, encoded by `head_bits.unspecialized`."""
    listed = sum(1 << head for head in fmt.low_heads or ())
    numbers = {"low": fmt.low(heads), "mask": listed, "aged": fmt.aged or 0}
    return {name: unspecialized(value) for name, value in numbers.items()}


@triton.jit
def quantize_tokens(x):
    return quantize(x, LEVELS)


@triton.jit
def locate(S, b, h, SIDE: tl.constexpr, C: tl.constexpr):
    """Return the place of head `h` in the arenas, its index among heads of its width, and whether that width is 2 bits.

    4-bit places come first."""
    if SIDE.LOW <= ALL:
        return h, (b * C.H + h).to(tl.int64), (h < 0) if SIDE.LOW == NONE else (h >= 0)
    else:
        n = tl.arange(0, triton.next_power_of_2(C.H))
        heads = tl.load(S.head_of + b * C.H + n, mask=n < C.H, other=-1)
        place = tl.sum(tl.where(heads == h, n, 0), 0)
        wide = C.H - number(S.low)
        index = tl.where(place < wide, b * wide + place, b * (C.H - wide) + place - wide)
        return place, index.to(tl.int64), place >= wide


@triton.jit
def run(S, home, capacity, I: tl.constexpr, SIDE: tl.constexpr):
    """Return run `I` of a head's blocks: `(begin, end, first)`, see `formats.contract.JitFormat`.

    With aged blocks, run 0 has the row's first blocks, with half the bits, and run 1 the others. Otherwise a run covers
    all blocks if the head has the run's bits, and no block if not."""
    if SIDE.AGED:
        aged = number(S.aged)
        if I == 0:
            return 0, aged, home.index * aged
        else:
            return aged, capacity, home.index * (capacity - aged) - aged
    else:
        return 0, tl.where(home.low == (I == 1), capacity, 0), home.index * capacity


@triton.jit
def block_form(code, scale, keep):
    """Apply the first stage: INT8 codes with one scale per token become `X1` with one scale per block.

    Returns integers in fp32. Tokens outside `keep` do not raise the scale."""
    s, divisor = block_scale(scale, keep)
    return x1_of(code, tl.div_rn(scale, tl.zeros_like(scale) + divisor)), tl.zeros_like(scale) + s


@triton.jit
def place(S, b, h, first, SIDE: tl.constexpr, C: tl.constexpr):
    """Return the place of head `h`. Stores it when the row's `first` block closes, unless heads are ranked by a
    kernel."""
    LOW: tl.constexpr = SIDE.LOW
    if LOW == RANKED:
        place, _, _ = locate(S, b, h, SIDE, C)
    else:
        place = h
        if LOW == LISTED:
            n = tl.arange(0, triton.next_power_of_2(C.H))
            mask = tl.full(n.shape, 0, tl.int64) + number(S.mask)
            low, own = (mask >> n.to(tl.int64)) & 1, (mask >> h.to(tl.int64)) & 1
            before = (n < C.H) & ((low < own) | ((low == own) & (n < h)))
            place = tl.sum(before.to(tl.int32), 0)
        if first:
            tl.store(S.head_of + b * C.H + place, h)
    return place


@triton.jit
def put(S, tokens, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Apply the second stage to a full block, and store it with its scale."""
    put_codes(S, tokens.code, tokens.keep, slot, SIDE, C)
    at = block_of(slot, C)
    tl.store(S.scale + at + tl.zeros_like(tokens.t), tokens.scale, mask=tokens.t == 0)  # one scale for the block


@triton.jit
def get(S, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Return INT8 tokens `[BLOCK, DP]` of a closed block, and the block's scale for each token."""
    at = block_of(slot, C)
    x1 = get_codes(S, slot, SIDE, C)
    return x1, tl.load(S.scale + at) + tl.full([C.BLOCK], 0, tl.float32)


@triton.jit
def get_codes(S, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Undo the second stage: return `X1` `[BLOCK, DP]` of a closed block."""
    LOW: tl.constexpr = SIDE.LOW
    AGED: tl.constexpr = SIDE.AGED
    WIDE: tl.constexpr = 8 if SIDE.BITS == 8 else 4
    d = tl.arange(0, SIDE.DP)
    at = block_of(slot, C)
    channel_scale = tl.load(S.channel_scale + at * SIDE.D + d, mask=d < SIDE.D, other=0).to(tl.int32)
    zero_point = tl.load(S.zero_point + at * SIDE.D + d, mask=d < SIDE.D, other=0).to(tl.int32)
    narrow, index = width_and_index(S, slot, SIDE, C)
    code = tl.full([C.BLOCK, SIDE.DP], 0, tl.int32)
    if AGED or LOW != ALL:
        if not narrow:
            code = read_codes(codes_of(S, WIDE), index, WIDE, False, SIDE, C)
    if AGED or LOW != NONE:
        if narrow:
            code = read_codes(codes_of(S, WIDE // 2), index, WIDE // 2, False, SIDE, C)
    return (code * channel_scale[None, :] + zero_point[None, :]).to(tl.int8)


@triton.jit
def scores(S, at, query, SIDE: tl.constexpr, C: tl.constexpr):
    """Multiply queries with a block of keys, as `formats.contract.JitFormat.scores`.

    The query is multiplied by the channel scales, relative to the largest possible channel scale. Using the true
    maximum would cost a reduction per block, and INT8 pairs have bits to spare. The zero points are summed as integers,
    for which a warp has an instruction. 8-bit codes have neither channel scales nor zero points."""
    s = tl.load(S.scale + at.block)
    if at.BITS == 8:
        x8 = split_neighbours(query.normalized * 256.0, C)
        return code_scores(S.codes8, at.codes, x8, 8, SIDE, C) * (s * query.scale)[None, :]
    else:
        d = tl.arange(0, SIDE.DP)
        channel_scale = tl.load(S.channel_scale + at.block * SIDE.D + d, mask=d < SIDE.D, other=0)
        zero_point = tl.load(S.zero_point + at.block * SIDE.D + d, mask=d < SIDE.D, other=0)
        LARGEST: tl.constexpr = 16 if at.BITS == 4 else 79  # largest channel scale, of codes that span [-119, 119]
        # fixed-point parts per query unit, such that 127 * 127 summed over all channels fits int32
        FINE: tl.constexpr = 131072.0 / SIDE.DP
        x8 = split_neighbours(query.normalized * (channel_scale.to(tl.float32) * (256.0 / LARGEST))[:, None], C)
        zero_point_sum = tl.sum((query.normalized * FINE).to(tl.int32) * zero_point.to(tl.int32)[:, None], 0)
        zero_point_sum = zero_point_sum.to(tl.float32) * query.scale
        products = code_scores(codes_of(S, at.BITS), at.codes, x8, at.BITS, SIDE, C) * (s * LARGEST)
        return products * query.scale[None, :] + (zero_point_sum * (s * (1.0 / FINE)))[None, :]


@triton.jit
def values(S, at, p, acc, alpha, beta, SIDE: tl.constexpr, C: tl.constexpr):
    """Add a block of values, as `formats.contract.JitFormat.values`.

    Channel scales multiply the sum, and the sum of the weights multiplies the zero points. INT8 pairs round weights so
    finely that the unrounded sum serves. 8-bit codes have neither channel scales nor zero points."""
    s, total = tl.load(S.scale + at.block), tl.sum(p, 0)
    if at.BITS == 8:
        o = code_values(S.codes8, at.codes, p * SPLIT_TOP, 8, SIDE, C)
        return acc * alpha[None, :] + o * (beta * (s * (1.0 / 127.0)))[None, :], total
    else:
        d = tl.arange(0, SIDE.DP)
        channel_scale = tl.load(S.channel_scale + at.block * SIDE.D + d, mask=d < SIDE.D, other=0).to(tl.float32)
        zero_point = tl.load(S.zero_point + at.block * SIDE.D + d, mask=d < SIDE.D, other=0).to(tl.float32)
        o = code_values(codes_of(S, at.BITS), at.codes, p * SPLIT_TOP, at.BITS, SIDE, C)
        o *= (channel_scale * (1.0 / 127.0))[:, None]
        return acc * alpha[None, :] + (o + total[None, :] * zero_point[:, None]) * (beta * s)[None, :], total


@triton.jit
def ring_values(S, tile, p, acc, alpha, beta, SIDE: tl.constexpr, C: tl.constexpr):
    codes, scales = S.ring + tile.first * SIDE.D + tile.start, S.ring_scale + tile.first + tile.start
    return token_values(codes, scales, tile.SLOTS, tile.TOKENS, 1, p, acc, alpha, beta, SIDE, C)


JIT = INT8_RING._replace(
    Tensors=Tensors,
    quantize_tokens=quantize_tokens,
    block_form=block_form,
    place=place,
    locate=locate,
    run=run,
    put=put,
    close=close,
    get=get,
    scores=scores,
    values=values,
    ring_values=ring_values,
    head_numbers=head_numbers,
    splits_int8=True,
)
