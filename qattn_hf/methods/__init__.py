"""Methods, one file each, found by file name. A method's settings choose formats, window, arithmetic and sparsity."""

from __future__ import annotations

import importlib
import pkgutil

from qattn_hf.methods.base import Method

__all__ = ["Method", "get_method", "list_methods"]


def list_methods() -> list[str]:
    """Names of all methods, for `patch(model, method=NAME)`: the files of `qattn_hf/methods/`, sorted."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base")


def get_method(name: str) -> type[Method]:
    """The settings class of a method, a pydantic model: `METHOD` of `qattn_hf/methods/NAME.py`."""
    return importlib.import_module(f"qattn_hf.methods.{name}").METHOD
