"""Packed KV caches and quantized attention for Transformers: `patch(model, method="turbo")`.

Importing this package loads neither torch nor Transformers. A name loads its module when it is first used. The names
below are functions and classes. The other public names are modules: `qattn_hf.bench`, `qattn_hf.check`,
`qattn_hf.compare`, `qattn_hf.inspect`, `qattn_hf.plan` and `qattn_hf.tune`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qattn_hf._version import __version__

if TYPE_CHECKING:
    from qattn_hf import bench, check, compare, inspect, plan, tune
    from qattn_hf.cache.cache import QAttnCache
    from qattn_hf.cache.reporting import Report, report
    from qattn_hf.errors import CapacityError, QAttnError, RecipeError, UnsupportedError
    from qattn_hf.methods import list_methods
    from qattn_hf.methods import register as register_method
    from qattn_hf.patching.by_name import QAttnConfig
    from qattn_hf.patching.patcher import patch, release, unpatch
    from qattn_hf.recipes.recipe import Recipe, load_recipe

__all__ = [
    "CapacityError",
    "QAttnCache",
    "QAttnConfig",
    "QAttnError",
    "Recipe",
    "RecipeError",
    "Report",
    "UnsupportedError",
    "__version__",
    "bench",
    "check",
    "compare",
    "inspect",
    "list_methods",
    "load_recipe",
    "patch",
    "plan",
    "register_method",
    "release",
    "report",
    "tune",
    "unpatch",
]

_MODULES = ("bench", "check", "compare", "inspect", "plan", "tune")
_PLACE_OF = {
    "CapacityError": "errors",
    "QAttnCache": "cache.cache",
    "QAttnConfig": "patching.by_name",
    "QAttnError": "errors",
    "Recipe": "recipes.recipe",
    "RecipeError": "errors",
    "Report": "cache.reporting",
    "UnsupportedError": "errors",
    "list_methods": "methods",
    "load_recipe": "recipes.recipe",
    "patch": "patching.patcher",
    "register_method": "methods:register",
    "release": "patching.patcher",
    "report": "cache.reporting",
    "unpatch": "patching.patcher",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"qattn_hf.{name}")
    if name not in _PLACE_OF:
        raise AttributeError(f"module 'qattn_hf' has no attribute {name!r}")
    module, _, inner = _PLACE_OF[name].partition(":")
    value = getattr(importlib.import_module(f"qattn_hf.{module}"), inner or name)
    globals()[name] = value  # later look-ups skip this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
