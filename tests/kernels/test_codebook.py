"""The assembly that looks codes up in a codebook: read and run here, since the interpreter takes plain arithmetic."""

from __future__ import annotations

import re

import pytest
import torch

from qattn_kernels.formats.codebook import _lookup
from qattn_kernels.formats.lloyd_max import codebook


def permute(low: int, high: int, selector: int) -> int:
    """PTX's `prmt.b32`: four bytes of `low` and `high`, chosen by four bits each, the highest of which asks for the
    byte's sign in all of its bits."""
    source, out = (low | high << 32).to_bytes(8, "little"), []
    for place in range(4):
        index = selector >> 4 * place & 15
        byte = source[index & 7]
        out.append((255 if byte & 128 else 0) if index & 8 else byte)
    return int.from_bytes(bytes(out), "little")


def run(assembly: str, word: int) -> tuple[int, int]:
    """`$0` and `$1` of a program that reads `$2`."""
    registers = {"$2": word}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in assembly.strip("{}").split(";")[1:]:
        if not line.strip():
            continue
        name, target, *given = re.findall(r"[^\s,]+", line)
        x = [value(word) for word in given]
        registers[target] = {
            "mov.b32": lambda x: x[0],
            "and.b32": lambda x: x[0] & x[1],
            "shl.b32": lambda x: x[0] << x[1] & 0xFFFFFFFF,
            "shr.b32": lambda x: x[0] >> x[1],
            "prmt.b32": lambda x: permute(*x),
            "lop3.b32": lambda x: x[0] & x[1] | ~x[0] & x[2] & 0xFFFFFFFF,  # the table 0xca: x[0] chooses
        }[name](x)
    return registers["$0"], registers["$1"]


def test_a_word_by_hand():
    """3 bits: levels are -127, -79, -45, -14, 14, 45, 79, 127; codes 2, 5, 0 and 7 stand in the lower half."""
    low, high = run(_lookup(3), 0x00007052)
    assert low == 0x7F812DD3  # 127, -127, 45, -45
    assert high == 0x81818181  # code 0 four times


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_word_of_codes_becomes_its_levels(bits: int):
    codes = torch.randint(0, 2**bits, (200, 8), generator=torch.Generator().manual_seed(bits)).tolist()
    levels = codebook(bits)
    for eight in codes:
        low, high = run(_lookup(bits), sum(code << 4 * i for i, code in enumerate(eight)))
        found = [byte - 256 * (byte > 127) for half in (low, high) for byte in half.to_bytes(4, "little")]
        assert found == [levels[code] for code in eight]
