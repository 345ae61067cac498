"""Errors that name the problem and the fix. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qattn_hf.messages import cut

if TYPE_CHECKING:
    from qattn_kernels.step.operator import CapacityError

__all__ = ["CapacityError", "QAttnError", "RecipeError", "UnsupportedError"]

LONGEST_MESSAGE = 2000  # characters


class QAttnError(ValueError):
    """Base class of this package's errors, a `ValueError`. `CapacityError` is a plain `ValueError`."""


class RecipeError(QAttnError):
    """An invalid recipe or setting. The message names the key, the recipe or file, and what is allowed.

    A message of more than 2,000 characters is shortened in its middle, because recipes may have texts of any length.
    """

    def __init__(self, message: str):
        super().__init__(cut(message, LONGEST_MESSAGE))


class UnsupportedError(QAttnError):
    """An unsupported model, cache or argument. Nothing was changed. The message says what to use instead."""


def __getattr__(name: str) -> Any:
    """Load `CapacityError`, which the operator raises, when it is first used."""
    if name != "CapacityError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from qattn_kernels.step.operator import CapacityError

    return CapacityError
