"""Load the packed codes of a block in kernels, and unpack 2- and 3-bit codes to one nibble each.

2- and 4-bit codes use one plane of bytes. 3-bit codes use two planes: the lower two bits, and the highest bit. A thread
reads four bytes at once, so with 2 and 3 bits it holds four neighbouring tokens of each quarter of a block. Products
take values in that token order, `half_order`, so that no token moves to another thread."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.jit.tile_order import part_order


@triton.jit
def plane_bytes(codes, at, byte, mask, d, ROWS: tl.constexpr, SIDE: tl.constexpr):
    """Load bytes `byte` `[n]` of block `at` for channels `d`: `[n, channels]` for keys, `[channels, n]` for values.

    Bytes are zero where `mask` `[n]` is false."""
    inside = d < SIDE.D
    if SIDE.VALUES:
        offsets, inside = at * (ROWS * SIDE.D) + d[:, None] * ROWS + byte[None, :], inside[:, None] & mask[None, :]
    else:
        offsets, inside = at * (ROWS * SIDE.D) + byte[:, None] * SIDE.D + d[None, :], inside[None, :] & mask[:, None]
    return tl.load(codes + offsets, mask=inside, other=0)


@triton.jit
def half_order(k, n: tl.constexpr, BITS: tl.constexpr):
    """Return the token of column `k` in half tiles of `n` values.

    With 2 and 3 bits, columns alternate between four tokens of either quarter, the order in which a thread holds them.
    """
    if BITS < 4:
        return k // n * n + k // 4 % 2 * (n // 2) + k % n // 8 * 4 + k % 4
    else:
        return k


@triton.jit
def in_half_order(y, BITS: tl.constexpr):
    """Return weights `[n, Q]` of a half's tokens in `half_order`."""
    if BITS < 4:
        quarters = tl.reshape(y, (2, y.shape[0] // 8, 4, y.shape[1]))
        return tl.reshape(tl.permute(quarters, (1, 0, 2, 3)), y.shape)
    else:
        return y


@triton.jit
def quarter_columns(one, other):
    """Join two quarters `[n, m]` of values into half a tile `[n, 2 m]` in `half_order`, without moving bytes between
    threads."""
    fours = tl.reshape(tl.join(one, other), (one.shape[0], one.shape[1] // 4, 4, 2))
    return tl.reshape(tl.permute(fours, (0, 1, 3, 2)), (one.shape[0], 2 * one.shape[1]))


class Planes(NamedTuple):
    """Bytes of a block's codes as stored. With 3 bits: `low` holds the lower two bits of each code. `even` and `odd`
    hold the highest bits of the first eighth of the tokens and of the next. Other widths have the same bytes in all
    three."""

    low: Any
    even: Any
    odd: Any


@triton.jit
def load_planes(codes, at, d, BITS: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Load the bytes of block `at` for channels `d`: `[bytes, channels]` for keys, `[channels, bytes]` for values."""
    ROWS: tl.constexpr = C.BLOCK * BITS // 8
    OWN: tl.constexpr = C.BLOCK * (2 if BITS == 3 else BITS) // 8
    t = tl.arange(0, OWN) if SIDE.VALUES else part_order(OWN, C.PARTS * OWN // C.BLOCK)
    low = plane_bytes(codes, at, t, t >= 0, d, ROWS, SIDE)
    if BITS == 3:  # two loads: a shift that depends on the token would cost a layout conversion
        EIGHTH: tl.constexpr = C.BLOCK // 8
        even = plane_bytes(codes, at, OWN + t, t < EIGHTH, d, ROWS, SIDE)
        return Planes(low, even, plane_bytes(codes, at, OWN - EIGHTH + t, t >= EIGHTH, d, ROWS, SIDE))
    else:
        return Planes(low, low, low)


@triton.jit
def spread_planes(x, BITS: tl.constexpr, C: tl.constexpr):
    """Return two tiles of bytes with two codes each, from 3- or 2-bit planes.

    The first tile has the first and third quarter of the tokens, the second tile the second and fourth. Example: 0x39
    (codes 1, 2, 3, 0) with 0x05 in the even plane gives 0x35 (codes 5, 3) and 0x06 (codes 6, 0)."""
    if BITS == 2:
        if C.PLAIN:
            return x.low & 51, (x.low >> 2) & 51
        asm: tl.constexpr = "{.reg .b32 s; shr.b32 s, $2, 2; and.b32 $0, $2, 0x33333333; and.b32 $1, s, 0x33333333;}"
        return tl.inline_asm_elementwise(asm, "=&r,=r,r", [x.low], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4)
    else:
        if C.PLAIN:
            top = x.even | x.odd >> 1
            return x.low & 51 | (top << 2) & 68, (x.low >> 2) & 51 | top & 68
        asm: tl.constexpr = "{.reg .b32 e, s, t; shr.b32 e, $4, 1; or.b32 e, e, $3; shl.b32 t, e, 2; and.b32 t, t, 0x44444444; and.b32 s, $2, 0x33333333; or.b32 t, s, t; shr.b32 s, $2, 2; and.b32 s, s, 0x33333333; and.b32 e, e, 0x44444444; or.b32 $1, s, e; mov.b32 $0, t;}"  # noqa: E501
        return tl.inline_asm_elementwise(
            asm, "=&r,=&r,r,r,r", [x.low, x.even, x.odd], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
