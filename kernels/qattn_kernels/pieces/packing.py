"""Codes of 4 and 2 bits as they lie in memory: written, read back, and taken apart into the half tiles of a product.

Byte `t` of a block holds tokens `t`, `t + n`, ... of its `n` bytes, so that masks and shifts yield whole part tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.jit import join_twins, twin


@triton.jit
def write_codes(codes, code, at, BITS: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr):
    """int32 codes `[BLOCK, DP]` of block `at`, packed: `[bytes, D]` of keys, `[D, bytes]` of values."""
    PARTS: tl.constexpr = 8 // BITS
    ROWS: tl.constexpr = C.BLOCK // PARTS
    parts = tl.reshape(code, (PARTS, ROWS, C.DP)) << (tl.arange(0, PARTS) * BITS)[:, None, None]
    packed = tl.sum(parts, 0).to(tl.uint8)  # the parts share no bit, so their sum is their union
    t, d = tl.arange(0, ROWS), tl.arange(0, C.DP)
    if VALUES:
        where = codes + at * (ROWS * C.D) + d[None, :] * ROWS + t[:, None]
    else:
        where = codes + at * (ROWS * C.D) + t[:, None] * C.D + d[None, :]
    tl.store(where, packed, mask=(d < C.D)[None, :])


@triton.jit
def read_codes(codes, at, BITS: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr):
    """The inverse: int32 `[BLOCK, DP]`."""
    ROWS: tl.constexpr = C.BLOCK * BITS // 8
    t, d = tl.arange(0, C.BLOCK), tl.arange(0, C.DP)
    byte, shift = t % ROWS, (t // ROWS) * BITS
    if VALUES:
        where = codes + at * (ROWS * C.D) + d[None, :] * ROWS + byte[:, None]
    else:
        where = codes + at * (ROWS * C.D) + byte[:, None] * C.D + d[None, :]
    return (tl.load(where, mask=(d < C.D)[None, :], other=0).to(tl.int32) >> shift[:, None]) & (2**BITS - 1)


@triton.jit
def _nibbles(x, HIGH: tl.constexpr, PLAIN: tl.constexpr):
    """Four bytes at a time: one half tile of a packed tile."""
    if PLAIN:
        return ((x >> (4 * HIGH)) & 15).to(tl.int8)
    if HIGH:
        asm: tl.constexpr = "{.reg .b32 t; shr.b32 t, $1, 4; and.b32 $0, t, 0x0f0f0f0f;}"
    else:
        asm: tl.constexpr = "and.b32 $0, $1, 0x0f0f0f0f;"
    return tl.inline_asm_elementwise(asm, "=r,r", [x], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def _crumbs(x, second, HIGH: tl.constexpr, PLAIN: tl.constexpr):
    """The same for 2 bits: `x` holds each byte twice, `second` (-1 or 0) says where its upper pair is meant."""
    if PLAIN:
        return ((x >> (4 * HIGH + 2 * (second & 1).to(tl.uint8))) & 3).to(tl.int8)
    if HIGH:
        asm: tl.constexpr = "{.reg .b32 a, b; shr.b32 a, $1, 4; shr.b32 b, $1, 6; lop3.b32 a, $2, b, a, 0xca; and.b32 $0, a, 0x03030303;}"  # noqa: E501
    else:
        asm: tl.constexpr = "{.reg .b32 a, b; shr.b32 b, $1, 2; lop3.b32 a, $2, b, $1, 0xca; and.b32 $0, a, 0x03030303;}"  # noqa: E501 # fmt: skip
    return tl.inline_asm_elementwise(asm, "=r,r,r", [x, second], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def half_tiles(codes, at, BITS: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr):
    """Codes of the two halves of a block, `[HALF, DP]` of keys, `[DP, HALF]` of values."""
    HALF: tl.constexpr = C.BLOCK // 2
    ROWS: tl.constexpr = C.BLOCK * BITS // 8
    t, d = tl.arange(0, HALF), tl.arange(0, C.DP)
    if VALUES:
        where = codes + at * (ROWS * C.D) + d[:, None] * ROWS + (t % ROWS)[None, :]
        x = tl.load(where, mask=(d < C.D)[:, None], other=0)
    else:
        where = codes + at * (ROWS * C.D) + (t % ROWS)[:, None] * C.D + d[None, :]
        x = tl.load(where, mask=(d < C.D)[None, :], other=0)
    if BITS == 4:
        return _nibbles(x, 0, C.PLAIN), _nibbles(x, 1, C.PLAIN)
    else:
        second = tl.where(t >= ROWS, -1, 0).to(tl.int8)
        second = tl.broadcast_to(second[None, :] if VALUES else second[:, None], x.shape)
        return _crumbs(x, second, 0, C.PLAIN), _crumbs(x, second, 1, C.PLAIN)


@triton.jit
def channel_scores(lo, hi, step, zero, s, q, C: tl.constexpr):
    """Scores `[HALF, Q]` of two half tiles of codes whose channels have a step and a zero, times `s`: these go into the
    query `q` `[DP, Q]`, so that codes enter the product as they are."""
    x = q * step[:, None]
    top = tl.max(tl.abs(x), 0) + 1e-30
    x8 = twin(x * (127.0 / top)[None, :])
    off = (tl.sum(q * zero[:, None], 0) * s)[None, :]
    up = (top * (s * (1.0 / 127.0)))[None, :]
    s_lo = join_twins(tl.dot(lo, x8, out_dtype=tl.int32)) * up + off
    s_hi = join_twins(tl.dot(hi, x8, out_dtype=tl.int32)) * up + off
    return s_lo, s_hi
