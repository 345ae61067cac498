"""Dequantize codes of 2 to 4 bits to the INT8 levels of a codebook, looked up in registers.

PTX's `prmt` makes a word of four bytes, each chosen from eight by four bits of a third word. So a table of eight levels
is one instruction for four codes; one of sixteen is two, and a choice between their results.

A tile of packed codes is taken as its two halves of tokens, whose codes stand in four bits each whatever their width:
in the lower and in the upper ones of a byte, or, where they are looked up, in the lower and the upper half of a word.

Worked, 3 bits: the levels -127, -79, -45, -14, 14, 45, 79, 127 are the words 0xf2d3b181 and 0x7f4f2d0e, first level in
the lowest byte. Of the codes 0x00007052 the lower half holds 2, 5, 0 and 7 from the lowest bits on; `prmt` by it takes
bytes 2, 5, 0 and 7 of the two words: 0x7f812dd3, the levels -45, 45, -127 and 127. The upper half holds four times code
0 and gives 0x81818181.

4 bits: the index of a byte has three bits, so codes 0 to 7 are looked up in one pair of words and 8 to 15 in the other,
both by the code less its fourth bit. Where the fourth bit of a selector is set, `prmt` fills a byte with the sign of
the one it names; 0xd9c8 and 0xfbea so spread the fourth bits of four codes over four bytes, and `lop3` with the table
0xca, `a ? b : c` bit by bit, takes one result or the other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import triton
import triton.language as tl


def words(levels: Sequence[int]) -> tuple[int, ...]:
    """The INT8 levels of all codes, four to an int32, the first in its lowest byte; the last word again where there are
    fewer than four."""
    table = struct.pack(f"{len(levels)}b", *levels)
    packed = struct.unpack(f"<{len(table) // 4}i", table)
    return packed + packed[-1:] * (4 - len(packed))


def lookup(levels: Sequence[int]) -> str:
    """Assembly: a word of eight codes to the levels of those in its lower and in its upper half; 4, 8 or 16 levels.

    A permutation takes its indices from the four bits at a time of half a word. Its index knows eight bytes; the fourth
    bit of a code, spread over a byte, chooses between two tables.
    """
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
    """int8 levels of int32 codes by the four `words` of a table, in plain arithmetic."""
    low = tl.where(code < 4, tl.full(code.shape, FIRST, tl.int32), tl.full(code.shape, SECOND, tl.int32))
    high = tl.where(code < 12, tl.full(code.shape, THIRD, tl.int32), tl.full(code.shape, FOURTH, tl.int32))
    return (tl.where(code < 8, low, high) >> ((code % 4) * 8)).to(tl.int8)


@triton.jit
def half_levels_of(x, LEVELS: tl.constexpr, LOOKUP: tl.constexpr, BITS: tl.constexpr, PLAIN: tl.constexpr):
    """int8 levels of the codes in the lower and in the upper halves of words, whose bytes are neighbours in the last
    dimension: by the assembly `lookup`, or, `PLAIN`, by the function `LEVELS` of int32 codes and their bits."""
    if PLAIN:
        pairs = tl.reshape(x.to(tl.int32), (x.shape[0], x.shape[1] // 4, 2, 2))
        low, high = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        low, high = tl.join(low & 15, low >> 4), tl.join(high & 15, high >> 4)
        return LEVELS(tl.reshape(low, x.shape), BITS), LEVELS(tl.reshape(high, x.shape), BITS)
    return tl.inline_asm_elementwise(LOOKUP, "=&r,=&r,r", [x], dtype=(tl.int8, tl.int8), is_pure=True, pack=4)


@triton.jit
def half_offsets(x, BITS: tl.constexpr, PLAIN: tl.constexpr):
    """int8 numbers of the codes in the lower and in the upper four bits of uint8 `x`, of formats whose codes are whole
    numbers raised by 8: sixteen times `code - 8`, which needs no shift down.

    0x95: code 5 moved to the upper bits is 0x50, whose highest bit flipped is 0xd0, -48 = 16 * (5 - 8); code 9 is 0x90
    and then 0x10, 16 = 16 * (9 - 8).
    """
    if PLAIN:
        return ((x << 4) ^ 128).to(tl.int8, bitcast=True), ((x & 240) ^ 128).to(tl.int8, bitcast=True)
    asm: tl.constexpr = "{.reg .b32 s, t; shl.b32 s, $2, 4; and.b32 s, s, 0xf0f0f0f0; and.b32 t, $2, 0xf0f0f0f0; xor.b32 $0, s, 0x80808080; xor.b32 $1, t, 0x80808080;}"  # noqa: E501
    return tl.inline_asm_elementwise(asm, "=&r,=&r,r", [x], dtype=(tl.int8, tl.int8), is_pure=True, pack=4)
