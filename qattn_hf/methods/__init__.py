"""Methods, one file each, found by file name: a method is a preset over format, window, compute and sparsity."""

from __future__ import annotations

import importlib
import pkgutil

from qattn_hf.methods.base import Method

__all__ = ["Method", "get_method", "list_methods"]


def list_methods() -> list[str]:
    """Names of all methods: the files of this folder."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base")


def get_method(name: str) -> type[Method]:
    """The settings class of `methods/NAME.py`, which calls it `METHOD`."""
    return importlib.import_module(f"qattn_hf.methods.{name}").METHOD
