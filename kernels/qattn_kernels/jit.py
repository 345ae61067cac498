"""Pieces that kernels share: rounding, conversions and exponentials, each with a plain form for the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves an integer in the low bits of a float
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def round_even(x):
    """To the nearest integer, ties to even, for |x| < 2^22. Exact only where the compiler may not fuse `x`'s product
    into the addition: kernels that write codes are launched with `enable_fp_fusion=False`."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def int_to_float(x):
    """int32 to fp32 for |x| < 2^22, by an addition: the conversion unit is as slow as the exponential's."""
    return (x + 0x4B400000).to(tl.float32, bitcast=True) - ROUNDER


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
def load_row(rows, b):
    """A row as it was before the call, and what the call brings: the columns of `Panel.rows`."""
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
    if b == 0:
        seen = tl.load(STATE[4]) + columns
        tl.store(STATE[4], seen)
        n = tl.arange(0, BP)
        counts = tl.load(ROWS + n * 8 + 5, mask=n < B, other=columns)
        if tl.min(counts, 0) < columns:
            tl.store(STATE[5], seen)


@triton.jit
def twin(y):
    """8-bit numbers as two each: of `y` `[n, Q]` in [-127, 127] column `2 i` has the integer, and column `2 i + 1` 254
    times what rounding left. `[n, 2 Q]` INT8. A thread holds both columns of a product, so that joining moves nothing.
    """
    rounded = y + ROUNDER
    rest = (y - (rounded - ROUNDER)) * 254.0 + ROUNDER
    return tl.reshape(to_codes(tl.join(rounded, rest)), (y.shape[0], 2 * y.shape[1]))


@triton.jit
def join_twins(x):
    """The joint value of integer sums of twins, `[n, 2 Q]` to `[n, Q]` in fp32."""
    integer, rest = tl.split(tl.reshape(int_to_float(x), (x.shape[0], x.shape[1] // 2, 2)))
    return integer + rest * (1.0 / 254.0)


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
