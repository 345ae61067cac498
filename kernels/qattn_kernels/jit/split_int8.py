"""Split 16-bit numbers into two INT8 columns of a tensor core product, high and low part, and join the sums."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.jit.math import MOST_SUMMED, ROUNDER, ROUNDER_BITS

SPLIT_TOP = tl.constexpr(32512.0)  # largest number that an INT8 pair represents: 127 * 256


@triton.jit
def split_int8(y, C: tl.constexpr):
    """Split numbers `y` `[n, Q]`, at most `SPLIT_TOP` large, into INT8 pairs `[n, 2 Q]`.

    Column `2 i + 1` holds the nearest multiple of 256, column `2 i` the remainder. A thread holds both columns of a
    product, so joining moves no data.

    One sum leaves both parts in the low bytes of a float, with 128 added for rounding. The sum can fuse with the
    product that computes `y`."""
    z = (y + (ROUNDER + 128.0)).to(tl.int32, bitcast=True)
    if C.PLAIN:
        both = (z ^ 128).to(tl.int16)
    else:
        asm: tl.constexpr = "{.reg .b32 t; prmt.b32 t, $1, $2, 0x5410; xor.b32 $0, t, 0x00800080;}"
        both = tl.inline_asm_elementwise(asm, "=r,r,r", [z], dtype=tl.int16, is_pure=True, pack=2)
    return tl.reshape(tl.join(both.to(tl.int8), (both >> 8).to(tl.int8)), (y.shape[0], 2 * y.shape[1]))


@triton.jit
def split_weights(y, C: tl.constexpr):
    """Return `split_int8` of weights in the order of `deinterleave`."""
    if C.FOURS:
        return split_neighbours(y, C)
    else:
        return split_int8(y, C)


@triton.jit
def split_neighbours(y, C: tl.constexpr):
    """Return `split_int8` of numbers for which a thread holds four consecutive rows.

    The thread writes four rows of a column as one word. The product, whose threads need neighbours of one column, then
    reads words instead of bytes."""
    if C.PLAIN:
        return split_int8(y, C)
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
def dot_split(a, b):
    """Multiply INT8 codes with INT8 pairs, for `join_split`. Sums start at the bits of a float (`ROUNDER`)."""
    if a.shape[1] > MOST_SUMMED:
        return (tl.dot(a, b, out_dtype=tl.int32).to(tl.float32) + ROUNDER).to(tl.int32, bitcast=True)
    else:
        start = tl.full([a.shape[0], b.shape[1]], ROUNDER_BITS, tl.int32)
        return tl.dot(a, b, acc=start, out_dtype=tl.int32)


@triton.jit
def join_split(x):
    """Join integer sums of INT8 pairs, `[n, 2 Q]`, to fp32 `[n, Q]` in units of 256. Sums must be below 2^22."""
    sums = x.to(tl.float32, bitcast=True) - ROUNDER
    rest, integer = tl.split(tl.reshape(sums, (x.shape[0], x.shape[1] // 2, 2)))
    return integer + rest * (1.0 / 256.0)


@triton.jit
def repeated_columns(x, C: tl.constexpr):
    """Return `[n, Q]` as `[n, N]`: each column twice if the call uses INT8 pairs, because a product needs eight
    columns."""
    if C.N > C.Q:
        return tl.reshape(tl.join(x, x), (x.shape[0], C.N))
    else:
        return x


@triton.jit
def unrepeated_columns(x, C: tl.constexpr):
    """Undo `repeated_columns` on a product: `[n, N]` to `[n, Q]`."""
    if C.N > C.Q:
        one, _ = tl.split(tl.reshape(x, (x.shape[0], C.Q, 2)))
        return one
    else:
        return x
