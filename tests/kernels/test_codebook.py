"""The lookup of levels by permutations of bytes, run by hand: the interpreter knows no assembly."""

from __future__ import annotations

import random

import pytest

from qattn_kernels.formats.codebook import lookup, words

WORD = 0xFFFFFFFF


def permuted(low: int, high: int, selector: int) -> int:
    """PTX `prmt.b32`: four bytes of eight by three bits each; the fourth bit spreads the byte's sign instead."""
    pool = (low | high << 32).to_bytes(8, "little")
    picked = [(selector >> (4 * i)) & 15 for i in range(4)]
    return int.from_bytes(
        [(255 if pool[n & 7] > 127 else 0) if n & 8 else pool[n & 7] for n in picked], "little"
    )  # fmt: skip


def run(assembly: str, word: int) -> tuple[int, int]:
    """The two results of a program of `lookup` for one word of codes."""
    values = {"$2": word}

    def read(text: str) -> int:
        return values[text] if text in values else int(text, 0)

    body = assembly.strip("{}").split(";", 1)[1]
    for line in filter(None, map(str.strip, body.split(";"))):
        name, _, rest = line.partition(" ")
        into, *given = (text.strip() for text in rest.split(","))
        a, b, c, *_ = [*map(read, given), 0, 0]
        values[into] = {
            "mov.b32": lambda a, b, c: a,
            "and.b32": lambda a, b, c: a & b,
            "shl.b32": lambda a, b, c: a << b & WORD,
            "shr.b32": lambda a, b, c: a >> b,
            "prmt.b32": permuted,
            "lop3.b32": lambda a, b, c: (a & b) | (~a & c & WORD),  # table 0xca: b where a, else c
        }[name](a, b, c)
    return values["$0"], values["$1"]


@pytest.mark.parametrize("size", [4, 8, 16])
def test_every_code_finds_its_level_at_every_place(size: int):
    """Of any table, whose levels need not lie alike on both sides of zero."""
    rng = random.Random(size)
    levels = rng.sample(range(-128, 128), size)
    for _ in range(300):
        codes = [rng.randrange(size) for _ in range(8)]
        found = run(lookup(levels), sum(code << (4 * i) for i, code in enumerate(codes)))
        for half, part in zip(found, (codes[:4], codes[4:]), strict=True):
            assert half.to_bytes(4, "little") == bytes(levels[code] & 255 for code in part)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_words_hold_four_levels_each(size: int):
    levels = random.Random(size).sample(range(-128, 128), size)
    found = [byte for word in words(levels) for byte in (word & WORD).to_bytes(4, "little")]
    assert found[:size] == [level & 255 for level in levels] and len(found) == 16
