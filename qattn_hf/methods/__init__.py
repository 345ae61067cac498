"""Methods, one file each, found by file name. A method's settings choose formats, window, arithmetic and sparsity.

Importing this package does not import torch. Methods' names need no import, and their settings import torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qattn_hf.methods.base import PURPOSES, Measured, Method

__all__ = [
    "PURPOSES",
    "Measured",
    "Method",
    "get_method",
    "is_method",
    "list_methods",
    "measured",
    "measured_settings",
    "register",
]
_registered: dict[str, type[Method]] = {}


def list_methods() -> list[str]:
    """Return the names of the package's methods for `patch(model, method=NAME)`, sorted: files of this folder."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base")


def is_method(name: str) -> bool:
    """Return whether `get_method` knows a name: a method of the package, or a registered one."""
    return name in _registered or name in list_methods()


def get_method(name: str) -> type[Method]:
    """Return a method's settings class, a pydantic model: `METHOD` of the method's file, or a registered class."""
    return _registered.get(name) or importlib.import_module(f"qattn_hf.methods.{name}").METHOD


def register(method: type[Method]) -> type[Method]:
    """Register a method that is not part of the package, under `method.name()`. Usable as a decorator.

    `patch` and recipes then accept the method. `list_methods` lists only the package's methods.

    Raises:
        ValueError: the package has a method of this name.
    """
    if (name := method.name()) in list_methods():
        raise ValueError(f"{name} is a method of the package. Fix: define the class in a module of another name")
    _registered[name] = method
    return method


def measured(purpose: str) -> list[Measured]:
    """Return all methods' settings worth measuring for one of `PURPOSES`, in the order of the methods' names.

    Raises:
        ValueError: `purpose` is not one of `PURPOSES`.
    """
    from qattn_hf.methods.base import PURPOSES

    if purpose not in PURPOSES:
        raise ValueError(f"nothing is measured for {purpose!r}; the purposes are {', '.join(PURPOSES)}")
    return [one for name in list_methods() for one in get_method(name).measured if purpose in one.purposes.split()]


def measured_settings(purpose: str) -> tuple[str, ...]:
    """Return `measured` settings as commands spell them: `("fp8", "int8", "kivi:bits=4", ...)`."""
    return tuple(one.setting for one in measured(purpose))


def __getattr__(name: str) -> Any:
    """Load a name of `base` when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("qattn_hf.methods.base"), name)
