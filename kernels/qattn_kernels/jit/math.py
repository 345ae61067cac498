"""Rounding, division, conversions and exponentials inside kernels, each with a plain form for the interpreter."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves an integer in the low bits of a float
ROUNDER_BITS = tl.constexpr(0x4B400000)  # of it
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)  # of fp32: by a smaller scale codes would overflow, so it is 0
TINY = tl.constexpr(1e-30)  # in place of a largest number of 0, which nothing can be divided by
NOTHING = tl.constexpr(-1e30)  # a maximum before any score, and the score of what is not seen: differences stay finite


@triton.jit
def round_even(x):
    """To the nearest integer, ties to even, for |x| < 2^22. Exact only where the compiler may not fuse `x`'s product
    into the addition: kernels that write codes are launched with `enable_fp_fusion=False`."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def divide(x, divisor):
    """`x / divisor`, correctly rounded, for normal divisors, one for many `x`, and quotients far from overflow.

    `div_rn` has a branch in each element for all other numbers, behind which nothing overlaps. Here one inverse serves
    a row, and each remainder is exact: a product that is correctly rounded is what the second one leaves (Markstein).
    The interpreter's `fma` rounds twice.
    """
    if INTERPRETED:
        return tl.div_rn(x, tl.broadcast_to(divisor, x.shape))
    else:
        small = tl.abs(divisor) < 8.673617379884035e-19  # 2^-60: times 2^60, so that no remainder is lost
        up = tl.where(small, 1152921504606846976.0, 1.0)
        x, divisor = x * up, divisor * up
        inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
        inverse, negative = tl.broadcast_to(inverse, x.shape), tl.broadcast_to(-divisor, x.shape)
        quotient = x * inverse
        quotient = tl.fma(tl.fma(quotient, negative, x), inverse, quotient)
        return tl.fma(tl.fma(quotient, negative, x), inverse, quotient)


@triton.jit
def inverse_of(x):
    """`1 / x` within a unit of the last place, for normal `x` with a normal inverse: one instruction in place of ten
    that care for others."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def divide_whole(x, divisor):
    """`x / divisor` of whole numbers below 2^12: correctly rounded, at half of what `divide` costs.

    The inverse may be off by some units; the remainder of its quotient is a whole number of units of that, so exact.
    What it adds is off by 2^-40 of the quotient, which lies farther from every boundary of rounding, or on one.
    """
    if INTERPRETED:
        return tl.div_rn(x, tl.broadcast_to(divisor, x.shape))
    else:
        inverse = tl.broadcast_to(inverse_of(divisor), x.shape)
        quotient = x * inverse
        return tl.fma(tl.fma(quotient, tl.broadcast_to(-divisor, x.shape), x), inverse, quotient)


@triton.jit
def spread_channels(x):
    """Tokens `[n, D]` with channels in another order, for sums or maxima over tokens; `channels_in_order` undoes it.

    Threads hold neighbouring channels, and warps pass results to one another through shared memory, where channels lie
    in their order: all threads of a warp write to one bank. In the order taken here, threads next to each other have
    channels next to each other. Nothing moves for it, registers are only renamed.
    """
    OWN: tl.constexpr = min(16, x.shape[1])  # channels of a thread
    parts = tl.reshape(x, (x.shape[0], x.shape[1] // OWN, OWN))
    return tl.reshape(tl.permute(parts, (0, 2, 1)), x.shape)


@triton.jit
def channels_in_order(x):
    """`[n, D]` with the channels as they were before `spread_channels`."""
    OWN: tl.constexpr = min(16, x.shape[1])
    parts = tl.reshape(x, (x.shape[0], OWN, x.shape[1] // OWN))
    return tl.reshape(tl.permute(parts, (0, 2, 1)), x.shape)


@triton.jit
def range_of_channels(x, keep):
    """Smallest and largest of each channel of tokens `[n, D]` where `keep` `[n]` holds, `[D]` each; infinities where
    it nowhere does."""
    low = tl.min(spread_channels(tl.where(keep[:, None], x, float("inf"))), 0, keep_dims=True)
    high = tl.max(spread_channels(tl.where(keep[:, None], x, float("-inf"))), 0, keep_dims=True)
    return tl.reshape(channels_in_order(low), (x.shape[1],)), tl.reshape(channels_in_order(high), (x.shape[1],))


@triton.jit
def short_scale(scale):
    """A scale whose last two bits are 0: its product with `ROUNDER` is exact, so that an integer sum raised by that
    comes down without an error. Of codes of 8 bits that would hardly matter, of 4 a unit of the sum is worth a lot."""
    return (scale.to(tl.int32, bitcast=True) & -4).to(tl.float32, bitcast=True)


@triton.jit
def code_bits(x):
    """int32 with an fp32 `x`, |x| < 2^21, rounded to the nearest integer, ties to even, in its low bits, of which
    packing takes as many as a code has; behind those stand `ROUNDER`'s. A conversion takes eight times as long."""
    return (x + ROUNDER).to(tl.int32, bitcast=True)


@triton.jit
def whole_number(x):
    """int32 of a whole number, |x| < 2^21."""
    return code_bits(x) - ROUNDER_BITS


@triton.jit
def to_codes(raised):
    """int8 of integers raised by `ROUNDER`: they stand in the low bytes."""
    return raised.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def float_to_int8(x):
    """Round an fp32 in [-127, 127] to int8, ties to even."""
    return code_bits(x).to(tl.int8)


@triton.jit
def sum_of_raised(raised, axis: tl.constexpr):
    """The sum of integers raised by `ROUNDER`, as floats: of their bits, in which `ROUNDER`'s are a constant."""
    if INTERPRETED:  # whose sum of 32-bit integers does not wrap around
        return tl.sum(raised - ROUNDER, axis)
    else:
        bits = tl.sum(raised.to(tl.int32, bitcast=True) - ROUNDER_BITS, axis)
        return bits.to(tl.float32)


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
def _magnitudes(x):
    """Of fp32; a maximum would drop a NaN, so that counts as infinity."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def broken(x, axis: tl.constexpr):
    """Which vectors of fp32 `x` are not finite."""
    return tl.max(_magnitudes(x), axis) > 3.4028234663852886e38


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x):
    """The largest magnitude in each row of fp32 `[n, d]`, infinite or NaN where a number is not finite."""
    if INTERPRETED:  # which goes through the numbers of a reduction of our own one by one, in Python
        return tl.max(_magnitudes(x), 1)
    else:
        return tl.reduce(tl.abs(x), 1, _larger)
