"""Errors that name what is wrong and what to do instead."""

from __future__ import annotations

from qattn_hf.messages import cut
from qattn_kernels.step.operator import CapacityError

__all__ = ["CapacityError", "QAttnError", "RecipeError", "UnsupportedError"]

LONGEST_MESSAGE = 2000  # characters


class QAttnError(ValueError):
    """Base of the errors of this package; `CapacityError` of the kernels is a `ValueError` too."""


class RecipeError(QAttnError):
    """A recipe or an override that cannot be: the message names the key, where it stands and what is allowed.

    Recipes are what somebody wrote, of any length, so a message of more than 2,000 characters is cut in its middle.
    """

    def __init__(self, message: str):
        super().__init__(cut(message, LONGEST_MESSAGE))


class UnsupportedError(QAttnError):
    """A model, a cache or an argument that the packed cache cannot serve; nothing was changed."""
