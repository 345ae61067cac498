"""Packed KV caches and quantized attention for transformers: `patch(model, method="turbo")`."""

from __future__ import annotations

from qattn_hf._version import __version__
from qattn_hf.cache import QAttnCache
from qattn_hf.errors import CapacityError, QAttnError, RecipeError, UnsupportedError
from qattn_hf.methods import list_methods
from qattn_hf.patcher import patch, release, unpatch
from qattn_hf.recipe import Recipe, load_recipe
from qattn_hf.report import Report, report

__all__ = [
    "CapacityError",
    "QAttnCache",
    "QAttnError",
    "Recipe",
    "RecipeError",
    "Report",
    "UnsupportedError",
    "__version__",
    "list_methods",
    "load_recipe",
    "patch",
    "release",
    "report",
    "unpatch",
]
