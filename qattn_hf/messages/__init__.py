"""Values and sizes as messages and tables show them. Importing this module does not import torch."""

from __future__ import annotations

import re
import reprlib
from decimal import Decimal
from typing import Any

UNITS = {f"{letter}ib": 2 ** (10 * n) for n, letter in enumerate("kmgt", 1)}
UNITS |= {f"{letter}b": 10 ** (3 * n) for n, letter in enumerate("kmgt", 1)}
LONGEST_INTEGER = 128  # bits; Python writes no integer of more than 4,300 digits


class _Short(reprlib.Repr):
    """`repr` limited in depth and length, whatever the value is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 4, 8, 16, 16
        self.maxstring = self.maxother = 200

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= LONGEST_INTEGER else f"<integer of {x.bit_length()} bits>"


_short = _Short()


def cut(text: str, longest: int) -> str:
    """Shorten `text` to at most `longest` characters, with `...` in its middle."""
    if len(text) <= longest:
        return text
    head = 2 * (longest - 3) // 3
    return f"{text[:head]}...{text[len(text) - (longest - 3 - head) :]}"


def shown(value: Any, longest: int = 100) -> str:
    """`repr` of a value in one line of at most `longest` characters."""
    return cut(" ".join(_short.repr(value).split()), longest)


def named(value: Any, longest: int = 100) -> str:
    """A text without quotes if it is short and printable; else its `repr`, as `shown` has it."""
    return value if isinstance(value, str) and value.isprintable() and len(value) <= longest else shown(value, longest)


def parse_size(value: int | str) -> int:
    """Bytes of a size such as `24GiB`, `1.5 TB` or `300KiB`: a number with a unit of 1024 or of 1000.

    Args:
        value: a text, whose letters may be small or large, or a number. A number without a unit counts bytes.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([kmgt]i?b)?", str(value).strip().lower())
    if match is None:
        raise ValueError(f"{shown(value)} is no size such as 24GiB, 1.5TB or 300KiB")
    return int(Decimal(match[1]) * (UNITS[match[2]] if match[2] else 1))


def size(n_bytes: float) -> str:
    """Bytes with a unit: `1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} GiB"
