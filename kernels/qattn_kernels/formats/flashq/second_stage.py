"""FlashQ's second stage in kernels: `X1` of a full block becomes codes of 4 or 2 bits, with a scale per channel.

`put_codes` takes `X1` of a whole block. `close` reads a block from the ring and does both stages, some channels at a
time, in less code."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats.head_bits import ALL, NONE, RANKED, number
from qattn_kernels.formats.packing import write_byte_tile, write_codes
from qattn_kernels.jit.math import code_bits, divide_whole, range_of_channels, round_even, whole_number
from qattn_kernels.jit.rows import block_of
from qattn_kernels.jit.tokens import ring_tile

LEVELS = tl.constexpr(119)
AT_ONCE = tl.constexpr(16)  # channels of a tile of `close`: 8 and 32 take longer with 64 rows on an H200


@triton.jit
def codes_of(S, BITS: tl.constexpr):
    """Return the tensor of codes with `BITS` bits."""
    if BITS == 8:
        return S.codes8
    elif BITS == 4:
        return S.codes4
    else:
        return S.codes2


@triton.jit
def _wide(S, LOW: tl.constexpr, C: tl.constexpr):
    """Return the number of 4-bit heads. They take the first places."""
    if LOW == NONE:
        return C.H
    elif LOW == ALL:
        return 0
    else:
        return C.H - number(S.low)


@triton.jit
def width_and_index(S, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Return whether a block has the smaller bit width of its side, and its index among the blocks of that width."""
    LOW: tl.constexpr = SIDE.LOW
    if SIDE.AGED:
        aged, head = number(S.aged), (slot.b * C.H + slot.h).to(tl.int64)
        narrow = slot.index < aged
        return narrow, tl.where(narrow, head * aged, head * (slot.capacity - aged) - aged) + slot.index
    else:
        wide = _wide(S, LOW, C)
        narrow = slot.place >= wide
        head = tl.where(narrow, slot.b * (C.H - wide) + slot.place - wide, slot.b * wide + slot.place)
        return narrow, head.to(tl.int64) * slot.capacity + slot.index


@triton.jit
def _channel_scale(span, low, LOW: tl.constexpr, CLIP: tl.constexpr):
    """Return the quantization step of channels that span `span` integers. `low`: heads with 2 bits.

    For 2 bits, `CLIP` sixteenths of half a step are cut off at both ends. Constant divisors compile without a division.
    """
    four, two = (2 * span + 15) // 30, (32 * span + 48 + CLIP) // (96 + 2 * CLIP)
    if LOW == NONE:
        found = four
    elif LOW == ALL:
        found = two
    else:
        found = tl.where(low, two, four)
    return tl.maximum(found, 1)


@triton.jit
def _store_ranges(S, at, d, channel_scale, zero_point, SIDE: tl.constexpr):
    """Store the steps and zero points of the channels `d` of block `at`."""
    tl.store(S.channel_scale + at * SIDE.D + d, channel_scale.to(tl.int8), mask=d < SIDE.D)
    tl.store(S.zero_point + at * SIDE.D + d, zero_point.to(tl.int8), mask=d < SIDE.D)


@triton.jit
def _steps(low, high, narrow, levels, LOW: tl.constexpr, CLIP: tl.constexpr):
    """Return steps and zero points of channels whose `X1` is from `low` to `high`; any `low > high` is an empty
    channel."""
    some = low <= high  # false if no token is kept
    low, high = whole_number(tl.where(some, low, 0.0)), whole_number(tl.where(some, high, 0.0))
    channel_scale = _channel_scale(high - low, narrow, LOW, CLIP)
    return channel_scale, low + ((high - low - channel_scale * levels) >> 1)


@triton.jit
def _coded(x1, channel_scale, zero_point, levels):
    """Return `code_bits` of the codes 0 to `levels` of `X1` `[n, channels]`."""
    zero_point, channel_scale = zero_point.to(tl.float32), channel_scale.to(tl.float32)
    coded = divide_whole(x1 - zero_point[None, :], channel_scale[None, :])
    return code_bits(tl.clamp(coded, 0.0, levels.to(tl.float32)))


@triton.jit
def _second_stage(S, code, keep, at, narrow, levels, LOW: tl.constexpr, CLIP: tl.constexpr, SIDE: tl.constexpr):
    """Return `code_bits` of the codes 0 to `levels` of `X1` `[BLOCK, DP]`; stores steps and zero points of block
    `at`."""
    low, high = range_of_channels(code, keep)
    channel_scale, zero_point = _steps(low, high, narrow, levels, LOW, CLIP)
    _store_ranges(S, at, tl.arange(0, SIDE.DP), channel_scale, zero_point, SIDE)
    return _coded(code, channel_scale, zero_point, levels)


@triton.jit
def put_codes(S, code, keep, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Apply the second stage to `X1` of a full block, and store the codes.

    Quantizes to 4 or 2 bits per channel, in integers. 8-bit blocks keep `X1` without a second stage."""
    LOW: tl.constexpr = SIDE.LOW
    AGED: tl.constexpr = SIDE.AGED
    CLIP: tl.constexpr = SIDE.CLIP
    narrow, index = width_and_index(S, slot, SIDE, C)
    at = block_of(slot, C)
    if SIDE.BITS == 8:
        if narrow:
            if AGED:
                coded = _second_stage(S, code, keep, at, narrow, tl.full([], 15, tl.int32), NONE, CLIP, SIDE)
                write_codes(S.codes4, coded, index, 4, False, SIDE, C)
        else:
            d = tl.arange(0, SIDE.DP)
            _store_ranges(S, at, d, tl.full([SIDE.DP], 1, tl.int8), tl.full([SIDE.DP], 0, tl.int8), SIDE)
            write_codes(S.codes8, code_bits(code), index, 8, False, SIDE, C)
    else:
        coded = _second_stage(S, code, keep, at, narrow, tl.where(narrow, 3, 15), RANKED if AGED else LOW, CLIP, SIDE)
        if AGED or LOW != ALL:
            if not narrow:
                write_codes(S.codes4, coded, index, 4, False, SIDE, C)
        if AGED or LOW != NONE:
            if narrow:
                write_codes(S.codes2, coded, index, 2, False, SIDE, C)


@triton.jit
def x1_of(code, ratio):
    """Return `X1` of INT8 codes `[n, channels]`, from `ratio` `[n]` of the tokens' scales to the block's."""
    return round_even(tl.clamp(code * ratio[:, None], -1.0 * LEVELS, 1.0 * LEVELS))


@triton.jit
def block_scale(scale, keep):
    """Return the scale of a block, and the divisor of its tokens' scales, which is never 0."""
    s = tl.max(tl.where(keep, scale, 0.0), 0)
    return s, tl.where(s == 0.0, 1.0, s)


@triton.jit
def _part(x, p: tl.constexpr, PARTS: tl.constexpr):
    """Return part `p` of `x` `[PARTS * n]`."""
    rows = tl.reshape(x.to(tl.float32), (PARTS, x.shape[0] // PARTS))
    return tl.sum(tl.where(tl.arange(0, PARTS)[:, None] == p, rows, 0.0), 0)


@triton.jit
def _parts(x, PARTS: tl.constexpr):
    """Return `x` in `PARTS` parts, a tuple."""
    if PARTS == 1:
        return (x,)
    elif PARTS == 2:
        return _part(x, 0, PARTS), _part(x, 1, PARTS)
    else:
        return _part(x, 0, PARTS), _part(x, 1, PARTS), _part(x, 2, PARTS), _part(x, 3, PARTS)


@triton.jit
def _tile_parts(S, start, d, ratios, bh, PARTS: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Return `X1` of channels `d` in `PARTS` parts of the block's tokens, a tuple."""
    N: tl.constexpr = C.BLOCK // PARTS
    pos = start + tl.arange(0, N)
    one = x1_of(ring_tile(S, pos, d, bh, SIDE, C), ratios[0])
    if PARTS == 1:
        return (one,)
    elif PARTS == 2:
        return one, x1_of(ring_tile(S, pos + N, d, bh, SIDE, C), ratios[1])
    else:
        two = x1_of(ring_tile(S, pos + N, d, bh, SIDE, C), ratios[1])
        three = x1_of(ring_tile(S, pos + 2 * N, d, bh, SIDE, C), ratios[2])
        return one, two, three, x1_of(ring_tile(S, pos + 3 * N, d, bh, SIDE, C), ratios[3])


@triton.jit
def _close_width(S, index, at, start, keep, ratio, bh, END, BITS: tl.constexpr, SIDE: tl.constexpr,
                 C: tl.constexpr):  # fmt: skip
    """Do the second stage of `close` with `BITS` bits, and write block `index` of these codes.

    A thread holds the tokens whose codes share a byte, as parts of the block. `END`: number of channels, not a
    constant: compilers would repeat the loop's code for each tile."""
    PARTS: tl.constexpr = 8 // BITS
    CLIP: tl.constexpr = SIDE.CLIP
    LOW: tl.constexpr = ALL if BITS == 2 else NONE
    keeps, ratios, levels = _parts(keep, PARTS), _parts(ratio, PARTS), tl.full([], 2**BITS - 1, tl.int32)
    for first in range(0, END, AT_ONCE):
        d = first + tl.arange(0, AT_ONCE)
        x1 = _tile_parts(S, start, d, ratios, bh, PARTS, SIDE, C)
        if BITS == 8:
            _store_ranges(S, at, d, tl.full([AT_ONCE], 1, tl.int8), tl.full([AT_ONCE], 0, tl.int8), SIDE)
            packed = code_bits(x1[0])
        else:
            low, high = tl.full(x1[0].shape, float("inf"), tl.float32), tl.full(x1[0].shape, float("-inf"), tl.float32)
            for p in tl.static_range(PARTS):
                kept = (keeps[p] != 0)[:, None]
                low = tl.minimum(low, tl.where(kept, x1[p], float("inf")))
                high = tl.maximum(high, tl.where(kept, x1[p], float("-inf")))
            channel_scale, zero_point = _steps(tl.min(low, 0), tl.max(high, 0), None, levels, LOW, CLIP)
            _store_ranges(S, at, d, channel_scale, zero_point, SIDE)
            packed = tl.full(x1[0].shape, 0, tl.int32)
            for p in tl.static_range(PARTS):
                packed |= (_coded(x1[p], channel_scale, zero_point, levels) & (2**BITS - 1)) << (p * BITS)
        write_byte_tile(codes_of(S, BITS), packed, index, d, BITS, SIDE, C)


@triton.jit
def close_codes(S, start, keep, ratio, slot, bh, END, SIDE: tl.constexpr, C: tl.constexpr):
    """Write the codes of the block that `close` packs. `ratio` `[BLOCK]`: of the tokens' scales to that of `X1`."""
    LOW: tl.constexpr = SIDE.LOW
    AGED: tl.constexpr = SIDE.AGED
    WIDE: tl.constexpr = 8 if SIDE.BITS == 8 else 4
    narrow, index = width_and_index(S, slot, SIDE, C)
    at = block_of(slot, C)
    if AGED or LOW != ALL or WIDE == 8:
        if not narrow:
            _close_width(S, index, at, start, keep, ratio, bh, END, WIDE, SIDE, C)
    if AGED or (LOW != NONE and WIDE == 4):
        if narrow:
            _close_width(S, index, at, start, keep, ratio, bh, END, WIDE // 2, SIDE, C)


@triton.jit
def ring_scales(S, start, bh, C: tl.constexpr):
    """Return the scales fp32 `[BLOCK]` of the ring's tokens from row position `start` on."""
    return tl.load(S.ring_scale + bh.to(tl.int64) * C.RING + (start + tl.arange(0, C.BLOCK)) % C.RING)


@triton.jit
def close(S, start, keep, slot, bh, END, SIDE: tl.constexpr, C: tl.constexpr):
    """Pack the full block from row position `start` on as `from_ring`, `block_form` and `put` together, in less code.

    Few steps close a block, so their code comes from memory each time, which takes most of their time. An append that
    closes blocks of 128 channels, all at once, takes 44 us for one row on an H200, and 88 us for 64 rows, whose
    programs wait for the same code. By tiles of 16 channels it takes 11 us, and 28 us."""
    t, scale = tl.arange(0, C.BLOCK), ring_scales(S, start, bh, C)
    s, divisor = block_scale(scale, keep)
    close_codes(S, start, keep, tl.div_rn(scale, tl.zeros_like(scale) + divisor), slot, bh, END, SIDE, C)
    tl.store(S.scale + block_of(slot, C) + tl.zeros_like(t), tl.zeros_like(scale) + s, mask=t == 0)  # of the block
