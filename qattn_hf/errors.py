"""Errors that name what is wrong and what to do instead. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qattn_hf.messages import cut

if TYPE_CHECKING:
    from qattn_kernels.step.operator import CapacityError

__all__ = ["CapacityError", "QAttnError", "RecipeError", "UnsupportedError"]

LONGEST_MESSAGE = 2000  # characters


class QAttnError(ValueError):
    """Base class of this package's errors, a `ValueError`. `CapacityError` is a `ValueError` alone."""


class RecipeError(QAttnError):
    """An invalid recipe or setting: the message names the key, the recipe or file, and what is allowed.

    A message of more than 2,000 characters is shortened in its middle, since recipes may hold texts of any length.
    """

    def __init__(self, message: str):
        super().__init__(cut(message, LONGEST_MESSAGE))


class UnsupportedError(QAttnError):
    """A model, cache or argument that is not supported; nothing was changed. The message says what to use instead."""


def __getattr__(name: str) -> Any:
    """`CapacityError`, which the operator raises: it is loaded when it is first asked for."""
    if name != "CapacityError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from qattn_kernels.step.operator import CapacityError

    return CapacityError
