"""Pieces that kernels share: rounding, conversions and exponentials, each with a plain form for the interpreter."""

from __future__ import annotations

import os

import triton
import triton.language as tl

from qattn_kernels.sizes import Low

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves an integer in the low bits of a float
LOG2E = tl.constexpr(1.4426950408889634)
TWIN_TOP = tl.constexpr(32512.0)  # the largest number that twins are made of: 127 times 256
LN2 = tl.constexpr(0.6931471805599453)
NONE, ALL, LISTED, RANKED = (tl.constexpr(int(kind)) for kind in Low)  # of a side's heads have 2 bits


@triton.jit
def round_even(x):
    """To the nearest integer, ties to even, for |x| < 2^22. Exact only where the compiler may not fuse `x`'s product
    into the addition: kernels that write codes are launched with `enable_fp_fusion=False`."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def divide(x, divisor):
    """`x / divisor`, correctly rounded, for a normal divisor `[n, 1]` or `[1, n]` and quotients far from overflow.

    `div_rn` has a branch in each element for all other numbers, behind which nothing overlaps. Here one inverse serves
    a row, and each remainder is exact: a product that is correctly rounded is what the second one leaves (Markstein).
    The interpreter's `fma` rounds twice.
    """
    if INTERPRETED:
        return tl.div_rn(x, tl.broadcast_to(divisor, x.shape))
    else:
        up = tl.where(divisor < 8.673617379884035e-19, 1152921504606846976.0, 1.0)  # 2^-60, 2^60: no remainder is lost
        x, divisor = x * up, divisor * up
        inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
        inverse, negative = tl.broadcast_to(inverse, x.shape), tl.broadcast_to(-divisor, x.shape)
        quotient = x * inverse
        quotient = tl.fma(tl.fma(quotient, negative, x), inverse, quotient)
        return tl.fma(tl.fma(quotient, negative, x), inverse, quotient)


@triton.jit
def short_scale(scale):
    """A scale whose last two bits are 0: its product with `ROUNDER` is exact, so that an integer sum raised by that
    comes down without an error. Of codes of 8 bits that would hardly matter, of 4 a unit of the sum is worth a lot."""
    return (scale.to(tl.int32, bitcast=True) & -4).to(tl.float32, bitcast=True)


@triton.jit
def to_codes(raised):
    """int8 of integers raised by `ROUNDER`: they stand in the low bytes."""
    return raised.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def float_to_int8(x):
    """Round an fp32 in [-127, 127] to int8, ties to even."""
    return to_codes(x + ROUNDER)


@triton.jit
def exp2_sas(x, threshold):
    """TurboAttention's SAS in base 2: a cubic for the fraction, here in [-1/2, 1/2], the integer part put in the
    exponent; 0 below `threshold`. x <= 7. Within 1e-4 relative of 2^x, and so within SAS's own 1.04e-3 of its
    polynomial. No instruction of it goes to the slow unit for conversions and exponentials."""
    y = tl.maximum(x, -125.0)
    z = y + ROUNDER
    f = y - (z - ROUNDER)
    p = 0.99992807 + f * (0.69326099 + f * (0.24261113 + f * 0.05517167))
    p = (p.to(tl.int32, bitcast=True) + (z.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)
    return tl.where(x >= threshold, p, 0.0)


@triton.jit
def broken(x, axis: tl.constexpr):
    """Which vectors of fp32 `x` are not finite. A maximum would drop a NaN, so that counts as infinity."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis) > 3.4028234663852886e38


@triton.jit
def load_row(rows, b):
    """A row as it was before the call, and what the call brings: six columns of `Panel.rows`."""
    r = rows + b * 8
    return tl.load(r), tl.load(r + 1), tl.load(r + 2), tl.load(r + 3), tl.load(r + 4), tl.load(r + 5)


@triton.jit
def packed_since(j, open_start, C: tl.constexpr):
    """First query position that reads block `j` of the open span from its codes: as in single steps."""
    end = open_start + (j + 1) * C.BLOCK
    step = open_start + (j * C.BLOCK // C.SPAN + 1) * C.SPAN - 1 + C.RESIDUAL
    return tl.maximum(end, step)


@triton.jit
def slot_bits(dropped, slot):
    """Whether the score of a slot is masked; `dropped` points to the first byte of a head."""
    return (tl.load(dropped + slot // 8).to(tl.int32) >> (slot % 8)) & 1


@triton.jit
def commit_row(ROWS, STATE, row, b, B, columns, BP: tl.constexpr, C: tl.constexpr):
    """The row's new lengths, once nobody reads the old ones: kernels after the append read `ROWS`."""
    length, closed, open_start, closing, first, count = row
    tl.store(STATE[0] + b, length + count)
    tl.store(STATE[1] + b, closed + closing)
    tl.store(STATE[2] + b, open_start + closing * C.BLOCK)
    tl.store(STATE[3] + b, tl.maximum(tl.load(STATE[3] + b), length + count))
    lost = tl.load(ROWS + b * 8 + 6)
    if lost > 0:
        tl.store(STATE[6] + b, tl.load(STATE[6] + b) + lost)
    if b == 0:
        seen, n = tl.load(STATE[4]), tl.arange(0, BP)
        tl.store(STATE[4], seen + columns)
        starts = tl.load(ROWS + n * 8 + 4, mask=n < B, other=0)
        counts = tl.load(ROWS + n * 8 + 5, mask=n < B, other=columns)
        padding = tl.max(tl.where(starts + counts < columns, columns, starts), 0)  # to the end of the last one
        if padding > 0:
            tl.store(STATE[5], seen + padding)


@triton.jit
def flip_bits(flags, slot, where):
    """Flip bits of `dropped`; entries may share a word."""
    words = flags.to(tl.pointer_type(tl.int32)) + slot // 32
    tl.atomic_xor(words, tl.full(slot.shape, 1, tl.int32) << (slot % 32), mask=where)


@triton.jit
def settle_sinks(TABLE, DROPPED, row, bh, NB, C: tl.constexpr):
    """End of a call: bits of `dropped` follow the table of sinks, once nobody reads the old ones."""
    if row[3] > 0:
        e = bh.to(tl.int64) * C.ENTRIES + tl.arange(0, C.ENTRIES)
        changed = (tl.load(TABLE.born + e) > row[1]) ^ (tl.load(TABLE.written + e) > row[1])
        flags = DROPPED + bh.to(tl.int64) * NB * (C.BLOCK // 8)
        flip_bits(flags, tl.load(TABLE.slot + e), changed)


@triton.jit
def twin(y, C: tl.constexpr):
    """Two 8-bit numbers of each: of `y` `[n, Q]`, at most `TWIN_TOP` large, column `2 i + 1` has the nearest multiple
    of 256, and column `2 i` what that leaves. `[n, 2 Q]` INT8. A thread holds both columns of a product, so that
    joining moves nothing.

    One sum, fused with a product that made `y`, leaves both in the low bytes of a float, if 128 is added for rounding.
    """
    z = (y + (ROUNDER + 128.0)).to(tl.int32, bitcast=True)
    if C.PLAIN:
        both = (z ^ 128).to(tl.int16)
    else:
        asm: tl.constexpr = "{.reg .b32 t; prmt.b32 t, $1, $2, 0x5410; xor.b32 $0, t, 0x00800080;}"
        both = tl.inline_asm_elementwise(asm, "=r,r,r", [z], dtype=tl.int16, is_pure=True, pack=2)
    return tl.reshape(tl.join(both.to(tl.int8), (both >> 8).to(tl.int8)), (y.shape[0], 2 * y.shape[1]))


@triton.jit
def twin_weights(y, C: tl.constexpr):
    """The same of weights `in_line`, of which a thread has neighbours: it writes four tokens of a column at once, and
    so the product, whose threads want neighbours of one column, reads words instead of bytes."""
    if C.PLAIN or not C.FOURS:
        return twin(y, C)
    else:
        N: tl.constexpr = y.shape[0] // 4
        z = (y + (ROUNDER + 128.0)).to(tl.int32, bitcast=True)
        even, odd = tl.split(tl.permute(tl.reshape(z, (N, 2, 2, y.shape[1])), (0, 3, 1, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        asm: tl.constexpr = "{.reg .b32 a, b; prmt.b32 a, $2, $3, 0x5140; prmt.b32 b, $4, $5, 0x5140; prmt.b32 $0, a, b, 0x5410; xor.b32 $0, $0, 0x80808080; prmt.b32 $1, a, b, 0x7632;}"  # noqa: E501
        words = tl.inline_asm_elementwise(
            asm, "=&r,=r,r,r,r,r", [first, second, third, fourth], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        x = tl.reshape(tl.join(words[0], words[1]), (N, 2 * y.shape[1]))
        low, high = tl.join(x.to(tl.int8), (x >> 16).to(tl.int8)), tl.join((x >> 8).to(tl.int8), (x >> 24).to(tl.int8))
        tokens = tl.permute(tl.reshape(tl.join(low, high), (N, 2 * y.shape[1], 4)), (0, 2, 1))
        return tl.reshape(tokens, (y.shape[0], 2 * y.shape[1]))


@triton.jit
def dot_twins(a, b):
    """Product of INT8 codes with twins, for `join_twins`: its sums start where their bits are those of a float."""
    start = tl.full([a.shape[0], b.shape[1]], 0x4B400000, tl.int32)
    return tl.dot(a, b, acc=start, out_dtype=tl.int32)


@triton.jit
def join_twins(x):
    """The joint value, in multiples of 256, of integer sums of twins, `[n, 2 Q]` to `[n, Q]` in fp32, for sums below
    2^22."""
    sums = x.to(tl.float32, bitcast=True) - ROUNDER
    rest, integer = tl.split(tl.reshape(sums, (x.shape[0], x.shape[1] // 2, 2)))
    return integer + rest * (1.0 / 256.0)


@triton.jit
def whole_columns(x, C: tl.constexpr):
    """`[n, Q]` as `[n, N]`, each column twice where a call has twins: a product takes eight columns at least."""
    if C.N > C.Q:
        return tl.reshape(tl.join(x, x), (x.shape[0], C.N))
    else:
        return x


@triton.jit
def own_columns(x, C: tl.constexpr):
    """The inverse: `[n, N]` of such a product to `[n, Q]`."""
    if C.N > C.Q:
        one, _ = tl.split(tl.reshape(x, (x.shape[0], C.Q, 2)))
        return one
    else:
        return x


@triton.jit
def stack(first, second):
    """`[n, Q]` and `[n, Q]` as `[2 n, Q]`; nothing moves."""
    return tl.reshape(tl.permute(tl.join(first, second), (2, 0, 1)), (2 * first.shape[0], first.shape[1]))


@triton.jit
def unstack(x):
    """The inverse."""
    return tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))


@triton.jit
def part_order(n: tl.constexpr, PARTS: tl.constexpr):
    """The token of each row of a tile of `PARTS` parts, one behind the other. Rows of a part that lie eight apart,
    which one thread has, are neighbours: see `twin_weights`."""
    row, PART = tl.arange(0, n), n // PARTS
    return row // PART * PART + row % 8 * (PART // 8) + row % PART // 8


@triton.jit
def token_order(n: tl.constexpr, PARTS: tl.constexpr):
    """The same for a tile whose parts take turns, eight rows each. So the rows of a thread come in the order of those
    that it has of an accumulator; in another the compiler would compute the softmax twice, once for the tile and once
    for the accumulator."""
    row = tl.arange(0, n)
    return row // 8 % PARTS * (n // PARTS) + row % 8 * (n // (8 * PARTS)) + row // (8 * PARTS)


@triton.jit
def by_part(x, PARTS: tl.constexpr):
    """Numbers `[n]` of the tokens in `part_order`. They are loaded in their own order, as whole words and ahead of
    their use."""
    return tl.reshape(tl.permute(tl.reshape(x, (PARTS, 8, x.shape[0] // (8 * PARTS))), (0, 2, 1)), (x.shape[0],))


@triton.jit
def by_token(x, PARTS: tl.constexpr):
    """The same in `token_order`."""
    return tl.reshape(tl.permute(tl.reshape(x, (PARTS, 8, x.shape[0] // (8 * PARTS))), (2, 0, 1)), (x.shape[0],))


@triton.jit
def take_turns(x, PARTS: tl.constexpr):
    """`[n, Q]` in `part_order` as a tile in `token_order`; nothing moves."""
    parts = tl.reshape(x, (PARTS, x.shape[0] // (8 * PARTS), 8, x.shape[1]))
    return tl.reshape(tl.permute(parts, (1, 0, 2, 3)), (x.shape[0], x.shape[1]))


@triton.jit
def in_line(x, PARTS: tl.constexpr):
    """A tile in `token_order` in the order of the tokens; nothing moves."""
    parts = tl.reshape(x, (x.shape[0] // (8 * PARTS), PARTS, 8, x.shape[1]))
    return tl.reshape(tl.permute(parts, (1, 2, 0, 3)), (x.shape[0], x.shape[1]))
