"""Formats of keys and values, a folder each, found by its name."""

from __future__ import annotations

import importlib

from qattn_kernels.formats.base import Arrival, Block, Format, Operand
from qattn_kernels.formats.granularity import QUERY_BLOCK
from qattn_kernels.formats.traits import Low, Span

__all__ = ["QUERY_BLOCK", "Arrival", "Block", "Format", "Low", "Operand", "Span", "get_format"]


def get_format(name: str) -> type[Format]:
    """The format class of `formats/NAME/reference.py`, which calls it `FORMAT`."""
    return importlib.import_module(f"qattn_kernels.formats.{name}.reference").FORMAT
