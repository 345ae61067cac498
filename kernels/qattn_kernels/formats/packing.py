"""Packed codes of 4, 3 and 2 bits in kernels: write, read, and multiply them as part tiles of a product.

`formats.packed` is the specification. Byte `t` of a block's `n` bytes holds tokens `t`, `t + n`, ..., the first in its
lowest bits. One mask and one shift then yield a part tile of neighbouring tokens. Example: 64 tokens with 4 bits. A
0x95 in byte 0 is code 5 of token 0 (low half tile) and code 9 of token 32 (high half tile)."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats.planes import in_half_order, load_planes, quarter_columns, spread_planes
from qattn_kernels.jit.math import channels_in_order, spread_channels
from qattn_kernels.jit.split_int8 import dot_split, join_split, split_weights
from qattn_kernels.jit.tile_order import deinterleave, interleave, stack, token_order, unstack


@triton.jit
def _plane(codes, at, byte, d, ROWS: tl.constexpr, SIDE: tl.constexpr):
    """Return the addresses `[n, DP]` of bytes in block `at`, which has `ROWS` bytes per channel."""
    if SIDE.VALUES:
        return codes + at * (ROWS * SIDE.D) + d * ROWS + byte
    else:
        return codes + at * (ROWS * SIDE.D) + byte * SIDE.D + d


@triton.jit
def _shuffle(x, VALUES: tl.constexpr):
    """Reorder bytes `[n, DP]` as `CodebookFormat.shuffle` does.

    Of four neighbours in memory, the lower halves come first. Neighbours are along `DP`, for values along `n`. 0x21,
    0x43, 0x65, 0x87 become 0x31, 0x75, 0x42, 0x86."""
    if VALUES:
        fours = tl.permute(tl.reshape(x, (x.shape[0] // 4, 2, 2, x.shape[1])), (0, 3, 1, 2))
    else:
        fours = tl.reshape(x, (x.shape[0], x.shape[1] // 4, 2, 2))
    one, other = tl.split(fours)
    halves = tl.join((one & 15) | ((other & 15) << 4), (one >> 4) | (other & 240))
    if VALUES:
        return tl.reshape(tl.permute(halves, (0, 3, 2, 1)), x.shape)
    else:
        return tl.reshape(tl.permute(halves, (0, 1, 3, 2)), x.shape)


@triton.jit
def _write_plane(codes, code, at, d, BITS: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr,
                 SHUFFLED: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Pack `BITS` bits of each int32 code `[BLOCK, n]` into bytes from `FIRST` on. A channel has `ROWS` bytes."""
    PARTS: tl.constexpr = 8 // BITS
    if PARTS > 2:  # with two parts, a thread holds both
        code = spread_channels(code)
    parts = tl.reshape(code, (PARTS, C.BLOCK // PARTS, code.shape[1])) << (tl.arange(0, PARTS) * BITS)[:, None, None]
    packed = tl.sum(parts, 0)  # parts share no bits, so the sum is their union
    packed = (channels_in_order(packed) if PARTS > 2 else packed).to(tl.uint8)
    if SHUFFLED:
        packed = _shuffle(packed, SIDE.VALUES)
    address = _plane(codes, at, FIRST + tl.arange(0, C.BLOCK // PARTS)[:, None], d[None, :], ROWS, SIDE)
    tl.store(address, packed.to(codes.dtype.element_ty, bitcast=True), mask=(d < SIDE.D)[None, :])


@triton.jit
def write_codes(codes, code, at, BITS: tl.constexpr, SHUFFLED: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr,
                first=0):  # fmt: skip
    """Pack int32 codes `[BLOCK, n]`, or their `code_bits`, into block `at`.

    Packed codes are `[bytes, D]` for keys and `[D, bytes]` for values. Writes all channels, or `n` channels from
    `first` on. 3-bit codes are stored as their lower two bits, then their highest bits. `SHUFFLED`: halves of bytes in
    the order of `CodebookFormat.shuffle`."""
    ROWS: tl.constexpr = C.BLOCK * BITS // 8
    d = first + tl.arange(0, code.shape[1])
    if BITS == 3:
        _write_plane(codes, code & 3, at, d, 2, 0, ROWS, SHUFFLED, SIDE, C)
        _write_plane(codes, (code >> 2) & 1, at, d, 1, C.BLOCK // 4, ROWS, SHUFFLED, SIDE, C)
    else:
        _write_plane(codes, code & (2**BITS - 1), at, d, BITS, 0, ROWS, SHUFFLED, SIDE, C)


@triton.jit
def write_byte_tile(codes, packed, at, d, BITS: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Write int32 bytes `[bytes of a channel, n]` of channels `d` to block `at`: what `write_codes` packs with 8, 4 or
    2 bits, unshuffled."""
    ROWS: tl.constexpr = C.BLOCK * BITS // 8
    address = _plane(codes, at, tl.arange(0, ROWS)[:, None], d[None, :], ROWS, SIDE)
    packed = packed.to(tl.uint8).to(codes.dtype.element_ty, bitcast=True)
    tl.store(address, packed, mask=(d < SIDE.D)[None, :])


@triton.jit
def _read_plane(codes, at, BITS: tl.constexpr, FIRST: tl.constexpr, ROWS: tl.constexpr, SHUFFLED: tl.constexpr,
                SIDE: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Return int32 `[BLOCK, DP]`, what `_write_plane` wrote with the same constants."""
    OWN: tl.constexpr = C.BLOCK * BITS // 8
    t, d = tl.arange(0, C.BLOCK)[:, None], tl.arange(0, SIDE.DP)[None, :]
    byte, shift, inside = t % OWN, t // OWN * BITS, d < SIDE.D
    if SHUFFLED:
        upper, shift = shift // 4 * 2, shift % 4
        if SIDE.VALUES:
            shift += byte % 2 * 4
            byte = byte // 4 * 4 + upper + byte % 4 // 2
        else:
            shift += d % 2 * 4
            d = d // 4 * 4 + upper + d % 4 // 2
    x = tl.load(_plane(codes, at, FIRST + byte, d, ROWS, SIDE), mask=inside, other=0).to(tl.int32)
    return (x >> shift) & (2**BITS - 1)


@triton.jit
def read_codes(codes, at, BITS: tl.constexpr, SHUFFLED: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Read int32 codes `[BLOCK, DP]` of block `at` in token order, as packed by `write_codes`. 8-bit codes are
    signed."""
    ROWS: tl.constexpr = C.BLOCK * BITS // 8
    if BITS == 3:
        low = _read_plane(codes, at, 2, 0, ROWS, SHUFFLED, SIDE, C)
        return low | _read_plane(codes, at, 1, C.BLOCK // 4, ROWS, SHUFFLED, SIDE, C) << 2
    elif BITS == 8:
        return _read_plane(codes, at, 8, 0, ROWS, SHUFFLED, SIDE, C).to(tl.int8).to(tl.int32)
    else:
        return _read_plane(codes, at, BITS, 0, ROWS, SHUFFLED, SIDE, C)


@triton.jit
def _unpack4(x, HIGH: tl.constexpr, PLAIN: tl.constexpr):
    """Return the int8 codes in the lower (or with `HIGH` upper) four bits of bytes `x`: from 0x95, code 5, or code 9.

    Assembly processes four bytes at a time. `PLAIN` does the same in plain arithmetic, for the interpreter."""
    if PLAIN:
        return ((x >> (4 * HIGH)) & 15).to(tl.int8)
    if HIGH:
        asm: tl.constexpr = "{.reg .b32 t; shr.b32 t, $1, 4; and.b32 $0, t, 0x0f0f0f0f;}"
    else:
        asm: tl.constexpr = "and.b32 $0, $1, 0x0f0f0f0f;"
    return tl.inline_asm_elementwise(asm, "=r,r", [x], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def _unpack2(x, PART: tl.constexpr, PLAIN: tl.constexpr):
    """Return int8 codes of one quarter of the tokens, from bytes `x` with four 2-bit codes each.

    An odd `PART` returns four times the codes, which saves a shift. 0x39 has codes 1, 2, 3 and 0: parts 0 to 3 give 1,
    8 = 4 * 2, 3 and 0."""
    if PLAIN:
        return ((x >> (PART // 2 * 4)) & (12 if PART % 2 else 3)).to(tl.int8)
    if PART == 0:
        asm: tl.constexpr = "and.b32 $0, $1, 0x03030303;"
    elif PART == 1:
        asm: tl.constexpr = "and.b32 $0, $1, 0x0c0c0c0c;"
    elif PART == 2:
        asm: tl.constexpr = "{.reg .b32 t; shr.b32 t, $1, 4; and.b32 $0, t, 0x03030303;}"
    else:
        asm: tl.constexpr = "{.reg .b32 t; shr.b32 t, $1, 4; and.b32 $0, t, 0x0c0c0c0c;}"
    return tl.inline_asm_elementwise(asm, "=r,r", [x], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def _planes(codes, at, BITS: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    return load_planes(codes, at, tl.arange(0, SIDE.DP), BITS, SIDE, C)


@triton.jit
def _quarter_bytes(codes, at, BITS: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Return the bytes that `_quarter` takes, for a block of 2 or 3 bits. 2-bit codes have a single plane."""
    x = _planes(codes, at, BITS, SIDE, C)
    if BITS == 3:
        return spread_planes(x, BITS, C)
    else:
        return x.low, x.low


@triton.jit
def _quarter(one, other, PART: tl.constexpr, BITS: tl.constexpr, PLAIN: tl.constexpr):
    """Return int8 codes of one quarter of the tokens; see `_unpack2` for 2-bit codes."""
    if BITS == 3:
        return _unpack4(other if PART % 2 else one, PART // 2, PLAIN)
    else:
        return _unpack2(one, PART, PLAIN)


@triton.jit
def half_values(codes, at, BITS: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Return codes of 2 to 4 bits of both halves of a block of values, `[DP, HALF]` each, tokens in `half_order`.

    2-bit codes of odd quarters come multiplied by four."""
    if BITS == 4:
        x = _planes(codes, at, BITS, SIDE, C).low
        return _unpack4(x, 0, C.PLAIN), _unpack4(x, 1, C.PLAIN)
    else:
        one, other = _quarter_bytes(codes, at, BITS, SIDE, C)
        first, second = _quarter(one, other, 0, BITS, C.PLAIN), _quarter(one, other, 1, BITS, C.PLAIN)
        third, fourth = _quarter(one, other, 2, BITS, C.PLAIN), _quarter(one, other, 3, BITS, C.PLAIN)
        return quarter_columns(first, second), quarter_columns(third, fourth)


@triton.jit
def unpack_parts(x, BITS: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Return int8 codes of bytes `x` with 2 or 4 bits, part after part, without moving rows between threads.

    Keys: `[n, DP]` to `[parts * n, DP]`. Values: `[D, n]` to `[D, parts * n]`. Odd parts of 2-bit codes come multiplied
    by four."""
    N: tl.constexpr = x.shape[0] if SIDE.VALUES else x.shape[0] * 8 // BITS
    M: tl.constexpr = x.shape[1] * 8 // BITS if SIDE.VALUES else x.shape[1]
    if BITS == 4:
        parts = tl.join(_unpack4(x, 0, C.PLAIN), _unpack4(x, 1, C.PLAIN))
        return tl.reshape(tl.permute(parts, (0, 2, 1) if SIDE.VALUES else (2, 0, 1)), (N, M))
    else:
        even = tl.join(_unpack2(x, 0, C.PLAIN), _unpack2(x, 2, C.PLAIN))
        parts = tl.join(even, tl.join(_unpack2(x, 1, C.PLAIN), _unpack2(x, 3, C.PLAIN)))
        return tl.reshape(tl.permute(parts, (0, 2, 3, 1) if SIDE.VALUES else (2, 3, 0, 1)), (N, M))


@triton.jit
def part_units(n: tl.constexpr, BITS: tl.constexpr):
    """Return the value `[n]` of one code unit in the output of `unpack_parts`."""
    if BITS == 2:
        return tl.where(tl.arange(0, n) // (n // 4) % 2 == 1, 0.25, 1.0)
    else:
        return tl.full([n], 1.0, tl.float32)


@triton.jit
def code_scores(codes, at, x8, BITS: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Multiply the codes of a block with the INT8 pairs `x8`: returns `[BLOCK, Q]` in `token_order`."""
    if BITS == 8:
        t, d = token_order(C.BLOCK, C.PARTS), tl.arange(0, SIDE.DP)
        address = codes + at * (C.BLOCK * SIDE.D) + t[:, None] * SIDE.D + d[None, :]
        return join_split(dot_split(tl.load(address, mask=(d < SIDE.D)[None, :], other=0), x8))
    elif BITS == 4:
        x = _planes(codes, at, BITS, SIDE, C).low
        lo = join_split(dot_split(_unpack4(x, 0, C.PLAIN), x8))
        hi = join_split(dot_split(_unpack4(x, 1, C.PLAIN), x8))
        return interleave(stack(lo, hi), C.PARTS)
    else:
        ODD: tl.constexpr = 0.25 if BITS == 2 else 1.0
        one, other = _quarter_bytes(codes, at, BITS, SIDE, C)
        first = join_split(dot_split(_quarter(one, other, 0, BITS, C.PLAIN), x8))
        second = join_split(dot_split(_quarter(one, other, 1, BITS, C.PLAIN), x8)) * ODD
        third = join_split(dot_split(_quarter(one, other, 2, BITS, C.PLAIN), x8))
        fourth = join_split(dot_split(_quarter(one, other, 3, BITS, C.PLAIN), x8)) * ODD
        even, odd = stack(first, third), stack(second, fourth)
        pairs = tl.reshape(tl.join(even, odd), (2, C.BLOCK // 4, even.shape[1], 2))
        return interleave(tl.reshape(tl.permute(pairs, (0, 3, 1, 2)), (C.BLOCK, even.shape[1])), C.PARTS)


@triton.jit
def _weight_halves(y, BITS: tl.constexpr, C: tl.constexpr):
    """Return the weights `[BLOCK, Q]` of both halves of a block's tokens.

    Weights of odd 2-bit quarters are divided by four, because those codes come multiplied by four."""
    y_lo, y_hi = unstack(y)
    if BITS == 2:
        unit = tl.where(tl.arange(0, C.BLOCK // 2) < C.BLOCK // 4, 1.0, 0.25)[:, None]
        return y_lo * unit, y_hi * unit
    else:
        return y_lo, y_hi


@triton.jit
def code_values(codes, at, y, BITS: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Return sums `[DP, Q]` of a block's codes, weighted by `y` `[BLOCK, Q]` in `token_order`, at most `SPLIT_TOP`
    each."""
    y = deinterleave(y, C.PARTS)
    if BITS == 8:
        o = dot_split(_planes(codes, at, BITS, SIDE, C).low, split_weights(y, C))
    elif BITS == 4 or C.BLOCK < 128:  # a product needs at least 32 tokens
        y_lo, y_hi = _weight_halves(y, BITS, C)
        lo, hi = half_values(codes, at, BITS, SIDE, C)
        y_lo, y_hi = in_half_order(y_lo, BITS), in_half_order(y_hi, BITS)
        o = tl.dot(hi, split_weights(y_hi, C), acc=dot_split(lo, split_weights(y_lo, C)), out_dtype=tl.int32)
    else:
        one, other = _quarter_bytes(codes, at, BITS, SIDE, C)
        y_lo, y_hi = _weight_halves(y, BITS, C)
        first, second = unstack(y_lo)
        third, fourth = unstack(y_hi)
        o = dot_split(_quarter(one, other, 0, BITS, C.PLAIN), split_weights(first, C))
        o = tl.dot(_quarter(one, other, 1, BITS, C.PLAIN), split_weights(second, C), acc=o, out_dtype=tl.int32)
        o = tl.dot(_quarter(one, other, 2, BITS, C.PLAIN), split_weights(third, C), acc=o, out_dtype=tl.int32)
        o = tl.dot(_quarter(one, other, 3, BITS, C.PLAIN), split_weights(fourth, C), acc=o, out_dtype=tl.int32)
    return join_split(o)
