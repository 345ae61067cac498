"""Formats of keys and values, one file each, found by file name."""

from __future__ import annotations

import importlib

from qattn_kernels.stores.base import Arrival, Block, Operand, Store

__all__ = ["Arrival", "Block", "Operand", "Store", "get_store"]


def get_store(name: str) -> type[Store]:
    """The store class of `stores/NAME.py`, which calls it `STORE`."""
    return importlib.import_module(f"qattn_kernels.stores.{name}").STORE
