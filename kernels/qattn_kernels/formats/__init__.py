"""Formats of keys and values. Each has its own folder and is found by its name."""

from __future__ import annotations

import importlib

from qattn_kernels.formats.base import Arrival, Block, Format, Operand
from qattn_kernels.formats.granularity import QUERY_BLOCK
from qattn_kernels.formats.traits import Low, Span

__all__ = ["QUERY_BLOCK", "Arrival", "Block", "Format", "Low", "Operand", "Span", "get_format"]


def get_format(name: str) -> type[Format]:
    """Return the format class of `formats/NAME/reference.py`, bound to `FORMAT` there."""
    return importlib.import_module(f"qattn_kernels.formats.{name}.reference").FORMAT
