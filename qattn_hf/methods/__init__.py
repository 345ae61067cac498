"""Methods, one file each, found by file name. A method's settings choose formats, window, arithmetic and sparsity.

Other packages add methods by an entry point: `[project.entry-points."qattn_hf.methods"]` with a line
`NAME = "MODULE:CLASS"`. Importing this package does not import torch. Methods' names need no import, and their settings
import torch.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from importlib.metadata import EntryPoint, entry_points
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
ENTRY_POINTS = "qattn_hf.methods"
_registered: dict[str, type[Method]] = {}


def list_methods() -> list[str]:
    """Return the names for `patch(model, method=NAME)`, sorted: files of this folder, and methods of other packages."""
    return sorted({*_own(), *_installed()})


def _own() -> frozenset[str]:
    """Return the files of this folder, and of folders that were added to `__path__`."""
    return _files(tuple(__path__))


@cache
def _files(folders: tuple[str, ...]) -> frozenset[str]:
    return frozenset(m.name for m in pkgutil.iter_modules(folders) if m.name != "base")


@cache
def _installed() -> dict[str, EntryPoint]:
    """Return the entry points of other packages by name. A name of this package stays its own."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in _own()}


def is_method(name: str) -> bool:
    """Return whether `get_method` knows a name: a listed method, or a registered one."""
    return name in _registered or name in _own() or name in _installed()


def get_method(name: str) -> type[Method]:
    """Return a method's settings class, a pydantic model.

    It is `METHOD` of the method's file, a registered class, or the class of an entry point.

    Raises:
        ImportError: no such method.
        QAttnError: an entry point cannot be loaded, or does not name a `Method` with the entry point's name.
    """
    if name in _registered:
        return _registered[name]
    if (point := _installed().get(name)) is None:
        return importlib.import_module(f"qattn_hf.methods.{name}").METHOD
    return _loaded(point)


def _loaded(point: EntryPoint) -> type[Method]:
    from qattn_hf.errors import QAttnError
    from qattn_hf.methods.base import Method

    line = f'entry point {ENTRY_POINTS}: {point.name} = "{point.value}"'
    try:
        found = point.load()
    except Exception as error:  # a package of somebody else may raise anything
        raise QAttnError(f"{line} cannot be loaded: {error!r}. Fix: mend or uninstall its package") from error
    if not (isinstance(found, type) and issubclass(found, Method) and found.name() == point.name):
        raise QAttnError(f"{line} is no subclass of Method in a module {point.name}. Fix: mend its package")
    return found


def register(method: type[Method]) -> type[Method]:
    """Register a method that is not part of the package, under `method.name()`. Usable as a decorator.

    `patch`, recipes and commands of this process then accept the method. `list_methods` does not list it: an entry
    point makes a method known to every process.

    Raises:
        ValueError: the package has a method of this name.
    """
    if (name := method.name()) in _own():
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
