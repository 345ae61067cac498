"""Numbers of 16 bits as two INT8 columns of a tensor core product, high and low part, and their sums joined again."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.jit.math import ROUNDER, ROUNDER_BITS

SPLIT_TOP = tl.constexpr(32512.0)  # the largest number that INT8 pairs are made of: 127 times 256


@triton.jit
def split_int8(y, C: tl.constexpr):
    """Two 8-bit numbers of each: of `y` `[n, Q]`, at most `SPLIT_TOP` large, column `2 i + 1` has the nearest multiple
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
def split_weights(y, C: tl.constexpr):
    """`split_int8` of weights as `deinterleave` orders them."""
    if C.FOURS:
        return split_neighbours(y, C)
    else:
        return split_int8(y, C)


@triton.jit
def split_neighbours(y, C: tl.constexpr):
    """`split_int8` of numbers of which a thread has four rows in a row: it writes four of a column at once, and so the
    product, whose threads want neighbours of one column, reads words instead of bytes."""
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
    """Product of INT8 codes with INT8 pairs, for `join_split`: its sums start where their bits are those of a float."""
    start = tl.full([a.shape[0], b.shape[1]], ROUNDER_BITS, tl.int32)
    return tl.dot(a, b, acc=start, out_dtype=tl.int32)


@triton.jit
def join_split(x):
    """The joint value, in multiples of 256, of integer sums of INT8 pairs, `[n, 2 Q]` to `[n, Q]` in fp32, for sums
    below 2^22."""
    sums = x.to(tl.float32, bitcast=True) - ROUNDER
    rest, integer = tl.split(tl.reshape(sums, (x.shape[0], x.shape[1] // 2, 2)))
    return integer + rest * (1.0 / 256.0)


@triton.jit
def repeated_columns(x, C: tl.constexpr):
    """`[n, Q]` as `[n, N]`, each column twice where a call has INT8 pairs: a product takes eight columns at least."""
    if C.N > C.Q:
        return tl.reshape(tl.join(x, x), (x.shape[0], C.N))
    else:
        return x


@triton.jit
def unrepeated_columns(x, C: tl.constexpr):
    """The inverse of `repeated_columns`: `[n, N]` of a product to `[n, Q]`."""
    if C.N > C.Q:
        one, _ = tl.split(tl.reshape(x, (x.shape[0], C.Q, 2)))
        return one
    else:
        return x
