"""Formats of keys and values, a folder each, found by its name."""

from __future__ import annotations

import importlib

from qattn_kernels.formats.base import Arrival, Block, Operand, Store

__all__ = ["Arrival", "Block", "Operand", "Store", "get_store"]


def get_store(name: str) -> type[Store]:
    """The store class of `formats/NAME/reference.py`, which calls it `STORE`."""
    return importlib.import_module(f"qattn_kernels.formats.{name}.reference").STORE
