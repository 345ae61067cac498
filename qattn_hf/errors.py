"""Errors that name what is wrong and what to do instead."""

from __future__ import annotations

from qattn_kernels.operator import CapacityError

__all__ = ["CapacityError", "QAttnError", "RecipeError", "UnsupportedError"]


class QAttnError(ValueError):
    """Base of the errors of this package; `CapacityError` of the kernels is a `ValueError` too."""


class RecipeError(QAttnError):
    """A recipe or an override that cannot be: the message names the key, where it stands and what is allowed."""


class UnsupportedError(QAttnError):
    """A model, a cache or an argument that the packed cache cannot serve; nothing was changed."""
