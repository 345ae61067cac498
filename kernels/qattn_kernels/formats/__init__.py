"""Formats of keys and values, found by name: the folders here, and classes that other packages define."""

from __future__ import annotations

import importlib

from qattn_kernels.formats.base import Arrival, Block, Format, Operand
from qattn_kernels.formats.granularity import QUERY_BLOCK
from qattn_kernels.formats.traits import Low, Span

__all__ = ["QUERY_BLOCK", "Arrival", "Block", "Format", "Low", "Operand", "Span", "get_format", "jit_module"]


def get_format(name: str) -> type[Format]:
    """Return the format class with a name: of `formats/NAME/reference.py`, or of a module imported from elsewhere.

    Raises:
        ImportError: no folder here and no imported class has the name.
    """
    if name not in Format.named:
        importlib.import_module(f"qattn_kernels.formats.{name}.reference")
    return Format.named[name]


def jit_module(name: str) -> str:
    """Return the module that has a format's Triton functions, if it has any: `jit` next to the class's module."""
    return f"{get_format(name).__module__.rpartition('.')[0]}.jit"
