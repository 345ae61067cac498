"""Dequantize codes of 2 to 4 bits to the INT8 levels of a codebook, with table lookups in registers.

PTX's `prmt` builds a word of four bytes, each chosen from eight bytes by four bits of a selector word. A table of eight
levels takes one instruction per four codes. A table of sixteen levels takes two, and a choice between their results.

A tile of packed codes is processed as its two halves of tokens. Every code occupies four bits: the lower and upper half
of a byte, or for lookups the lower and upper half of a word.

Example, 3 bits: the levels -127, -79, -45, -14, 14, 45, 79, 127 are the words 0xf2d3b181 and 0x7f4f2d0e, first level in
the lowest byte. In the codes 0x00007052, the lower half holds 2, 5, 0 and 7 from the lowest bits on. `prmt` picks bytes
2, 5, 0 and 7 of the two words: 0x7f812dd3, the levels -45, 45, -127 and 127. The upper half holds code 0 four times and
gives 0x81818181.

4 bits: a byte index has three bits, so one pair of words serves codes 0 to 7 and another pair codes 8 to 15. Both use
the code without its fourth bit. Where the fourth bit of a selector is set, `prmt` fills the byte with the sign of the
selected byte. The selectors 0xd9c8 and 0xfbea thus spread the fourth bits of four codes over four bytes. `lop3` with
table 0xca (`a ? b : c` bit by bit) then picks one result or the other."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import triton
import triton.language as tl


def words(levels: Sequence[int]) -> tuple[int, ...]:
    """Pack the INT8 levels of all codes, four per int32, the first in the lowest byte. Repeats the last word up to four
    words."""
    table = struct.pack(f"{len(levels)}b", *levels)
    packed = struct.unpack(f"<{len(table) // 4}i", table)
    return packed + packed[-1:] * (4 - len(packed))


def lookup(levels: Sequence[int]) -> str:
    """Return the assembly that maps a word of eight codes to the levels of its lower and its upper half.

    Takes 4, 8 or 16 levels. A permutation takes its indices from half a word, four bits each, and indexes eight bytes.
    With 16 levels, the fourth bit of a code is spread over a byte and chooses between two tables."""
    several = len(levels) > 8
    table = [f"0x{word & 0xFFFFFFFF:08x}" for word in words(levels)]
    pairs = [(table[0], table[1]), (table[2], table[3])] if several else [(table[0], table[1])]
    lines = ["and.b32 s, $2, 0x77777777;" if several else "mov.b32 s, $2;", "shr.b32 t, s, 16;"]
    for i, (one, other) in enumerate(pairs):
        lines += [f"mov.b32 u, {one};", f"mov.b32 v, {other};", f"prmt.b32 l{i}, u, v, s;", f"prmt.b32 h{i}, u, v, t;"]
    if several:
        lines += ["shl.b32 s, $2, 4;", "prmt.b32 t, s, $2, 0xd9c8;", "prmt.b32 s, s, $2, 0xfbea;"]
        lines += ["lop3.b32 $0, t, l1, l0, 0xca;", "lop3.b32 $1, s, h1, h0, 0xca;"]
    else:
        lines += ["mov.b32 $0, l0;", "mov.b32 $1, h0;"]
    return "{.reg .b32 s, t, u, v, l0, h0, l1, h1; " + " ".join(lines) + "}"


@triton.jit
def levels_of(code, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, FOURTH: tl.constexpr):
    """Return int8 levels of int32 codes from the four `words` of a table, in plain arithmetic."""
    low = tl.where(code < 4, tl.full(code.shape, FIRST, tl.int32), tl.full(code.shape, SECOND, tl.int32))
    high = tl.where(code < 12, tl.full(code.shape, THIRD, tl.int32), tl.full(code.shape, FOURTH, tl.int32))
    return (tl.where(code < 8, low, high) >> ((code % 4) * 8)).to(tl.int8)


@triton.jit
def half_levels_of(x, LEVELS: tl.constexpr, LOOKUP: tl.constexpr, BITS: tl.constexpr, PLAIN: tl.constexpr):
    """Return int8 levels of the codes in the lower and the upper halves of words.

    The bytes of a word are adjacent in the last dimension. Uses the assembly `lookup`; with `PLAIN`, the function
    `LEVELS` of int32 codes and their bits."""
    if PLAIN:
        pairs = tl.reshape(x.to(tl.int32), (x.shape[0], x.shape[1] // 4, 2, 2))
        low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        low, high = tl.join(low & 15, low >> 4), tl.join(high & 15, high >> 4)
        return LEVELS(tl.reshape(low, x.shape), BITS), LEVELS(tl.reshape(high, x.shape), BITS)
    return tl.inline_asm_elementwise(LOOKUP, "=&r,=&r,r", [x], dtype=(tl.int8, tl.int8), is_pure=True, pack=4)


@triton.jit
def half_offsets(x, BITS: tl.constexpr, PLAIN: tl.constexpr):
    """Return int8 numbers `16 * (code - 8)` for the codes in the lower and the upper four bits of uint8 `x`.

    For formats whose codes are whole numbers plus 8. The factor 16 avoids a shift down.

    0x95: code 5 moved to the upper bits is 0x50; flipping its highest bit gives 0xd0, -48 = 16 * (5 - 8). Code 9 is
    0x90, then 0x10, 16 = 16 * (9 - 8)."""
    if PLAIN:
        return ((x << 4) ^ 128).to(tl.int8, bitcast=True), ((x & 240) ^ 128).to(tl.int8, bitcast=True)
    asm: tl.constexpr = "{.reg .b32 s, t; shl.b32 s, $2, 4; and.b32 s, s, 0xf0f0f0f0; and.b32 t, $2, 0xf0f0f0f0; xor.b32 $0, s, 0x80808080; xor.b32 $1, t, 0x80808080;}"  # noqa: E501
    return tl.inline_asm_elementwise(asm, "=&r,=&r,r", [x], dtype=(tl.int8, tl.int8), is_pure=True, pack=4)
