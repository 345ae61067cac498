"""Rounding, division, conversions and exponentials in kernels, each with a plain form for the interpreter."""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves an integer in the low bits of a float
ROUNDER_BITS = tl.constexpr(0x4B400000)  # bits of `ROUNDER`
MOST_SUMMED = tl.constexpr(256)  # products of two INT8 codes whose sum is below 2^22, so that `ROUNDER` can hold it
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SMALLEST_NORMAL = tl.constexpr(1.1754943508222875e-38)  # of fp32; smaller scales become 0: codes would overflow
TINY = tl.constexpr(1e-30)  # replaces a maximum of 0 as divisor
NOTHING = tl.constexpr(-1e30)  # initial maximum, and score of masked tokens; finite, so that differences are too


@triton.jit
def round_even(x):
    """Round to the nearest integer, ties to even, for |x| < 2^22.

    Exact only if `x` is not a product that the compiler fuses into the addition. Launch kernels that write codes with
    `enable_fp_fusion=False`."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def divide(x, divisor):
    """Return `x / divisor`, correctly rounded, with one divisor for many `x`.

    The divisor must be normal and the quotient far from overflow. `div_rn` branches per element for all other numbers,
    which prevents overlap. This function computes one inverse per row and two exact remainders; the second correction
    is correctly rounded (Markstein). The interpreter's `fma` rounds twice, so it uses `div_rn`."""
    if INTERPRETED:
        return tl.div_rn(x, tl.broadcast_to(divisor, x.shape))
    else:
        small = tl.abs(divisor) < 8.673617379884035e-19  # below 2^-60: scale by 2^60 to keep remainders exact
        up = tl.where(small, 1152921504606846976.0, 1.0)
        x, divisor = x * up, divisor * up
        inverse = tl.div_rn(tl.full(divisor.shape, 1.0, tl.float32), divisor)
        inverse, negative = tl.broadcast_to(inverse, x.shape), tl.broadcast_to(-divisor, x.shape)
        quotient = x * inverse
        quotient = tl.fma(tl.fma(quotient, negative, x), inverse, quotient)
        return tl.fma(tl.fma(quotient, negative, x), inverse, quotient)


@triton.jit
def inverse_of(x):
    """Return `1 / x` within one unit in the last place, for normal `x` with a normal inverse.

    One instruction, instead of ten that also handle other numbers."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)


@triton.jit
def divide_whole(x, divisor):
    """Return `x / divisor` for whole numbers below 2^12, correctly rounded, at half the cost of `divide`.

    The inverse may be off by some units. The remainder of its quotient is a whole number of these units, so it is
    exact. The correction is off by 2^-40 of the quotient. Quotients are farther than that from every rounding boundary,
    or exactly on one."""
    if INTERPRETED:
        return tl.div_rn(x, tl.broadcast_to(divisor, x.shape))
    else:
        inverse = tl.broadcast_to(inverse_of(divisor), x.shape)
        quotient = x * inverse
        return tl.fma(tl.fma(quotient, tl.broadcast_to(-divisor, x.shape), x), inverse, quotient)


@triton.jit
def spread_channels(x):
    """Reorder the channels of tokens `[n, D]` for reductions over tokens; `channels_in_order` undoes it.

    Threads hold neighbouring channels, and warps exchange results through shared memory in channel order. All threads
    of a warp would write to one bank. In this order, neighbouring threads have neighbouring channels. No data moves;
    registers are renamed."""
    OWN: tl.constexpr = min(16, x.shape[1])  # channels per thread
    parts = tl.reshape(x, (x.shape[0], x.shape[1] // OWN, OWN))
    return tl.reshape(tl.permute(parts, (0, 2, 1)), x.shape)


@triton.jit
def channels_in_order(x):
    """Undo `spread_channels` on `[n, D]`."""
    OWN: tl.constexpr = min(16, x.shape[1])
    parts = tl.reshape(x, (x.shape[0], OWN, x.shape[1] // OWN))
    return tl.reshape(tl.permute(parts, (0, 2, 1)), x.shape)


@triton.jit
def range_of_channels(x, keep):
    """Return minimum and maximum `[D]` of each channel over tokens `[n, D]` with `keep` `[n]`; infinities if no token
    is kept."""
    low = tl.min(spread_channels(tl.where(keep[:, None], x, float("inf"))), 0, keep_dims=True)
    high = tl.max(spread_channels(tl.where(keep[:, None], x, float("-inf"))), 0, keep_dims=True)
    return tl.reshape(channels_in_order(low), (x.shape[1],)), tl.reshape(channels_in_order(high), (x.shape[1],))


@triton.jit
def short_scale(scale):
    """Clear the last two bits of a scale, so that its product with `ROUNDER` is exact.

    An integer sum raised by `ROUNDER` then scales without error. This matters for 4-bit codes, where one unit of the
    sum is large."""
    return (scale.to(tl.int32, bitcast=True) & -4).to(tl.float32, bitcast=True)


@triton.jit
def code_bits(x):
    """Return int32 with fp32 `x`, |x| < 2^21, rounded to the nearest integer in its low bits, ties to even.

    The high bits come from `ROUNDER`; packing keeps only the code's low bits. A conversion instruction takes eight
    times as long."""
    return (x + ROUNDER).to(tl.int32, bitcast=True)


@triton.jit
def whole_number(x):
    """Return a whole number, |x| < 2^21, as int32."""
    return code_bits(x) - ROUNDER_BITS


@triton.jit
def to_codes(raised):
    """Return int8 from integers raised by `ROUNDER`, which hold the code in their low byte."""
    return raised.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def float_to_int8(x):
    """Round an fp32 in [-127, 127] to int8, ties to even."""
    return code_bits(x).to(tl.int8)


@triton.jit
def sum_of_raised(raised, axis: tl.constexpr):
    """Return the sum of integers raised by `ROUNDER`, as fp32. Sums their bits, in which `ROUNDER` is a constant."""
    if INTERPRETED:  # its int32 sum does not wrap around
        return tl.sum(raised - ROUNDER, axis)
    else:
        bits = tl.sum(raised.to(tl.int32, bitcast=True) - ROUNDER_BITS, axis)
        return bits.to(tl.float32)


@triton.jit
def exp2_sas(x, threshold):
    """Approximate `2^x` with TurboAttention's SAS in base 2, for x <= 7; 0 below `threshold`.

    A cubic covers the fraction, here in [-1/2, 1/2], and the integer part goes into the exponent. The result is within
    1e-4 relative of 2^x, and thus within the 1.04e-3 error of SAS's own polynomial. It avoids the slow unit for
    conversions and exponentials."""
    y = tl.maximum(x, -125.0)
    z = y + ROUNDER
    f = y - (z - ROUNDER)
    p = 0.99992807 + f * (0.69326099 + f * (0.24261113 + f * 0.05517167))
    p = (p.to(tl.int32, bitcast=True) + (z.to(tl.int32, bitcast=True) << 23)).to(tl.float32, bitcast=True)
    return tl.where(x >= threshold, p, 0.0)


@triton.jit
def _magnitudes(x):
    """Return fp32 magnitudes, with NaN as infinity, because a maximum would drop a NaN."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def broken(x, axis: tl.constexpr):
    """Return which vectors of fp32 `x` are not finite."""
    return tl.max(_magnitudes(x), axis) > 3.4028234663852886e38


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x):
    """Return the largest magnitude of each row of fp32 `[n, d]`; infinite or NaN for a non-finite row."""
    if INTERPRETED:  # it runs custom reductions number by number in Python
        return tl.max(_magnitudes(x), 1)
    else:
        return tl.reduce(tl.abs(x), 1, _larger)
