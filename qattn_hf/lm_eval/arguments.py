"""Read this package's keys from lm-eval's model arguments: method, recipe, settings, chunk."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from qattn_hf.errors import RecipeError
from qattn_hf.methods import get_method, list_methods
from qattn_hf.reading.chunks import CHUNK
from qattn_hf.recipes.recipe import Recipe, find_recipe, load_recipe
from qattn_hf.recipes.spelling import FULL


class Arguments(NamedTuple):
    """Model arguments, split.

    Attributes:
        recipe: None for full precision.
        chunk: tokens of a call while a text is scored.
        rest: arguments of lm-eval's model class HFLM.
    """

    recipe: Recipe | None
    chunk: int
    rest: dict[str, Any]


def split_arguments(arguments: dict[str, Any], harness: type) -> Arguments:
    """Split lm-eval's model arguments into this package's arguments and arguments of `harness`, lm-eval's model class.

    Raises:
        RecipeError: an unknown method or setting, a value out of range, or settings without a method.
    """
    known = set().union(*({*kind.model_fields, *kind.moved} for kind in map(get_method, list_methods())))
    known -= set(inspect.signature(harness).parameters)
    rest = dict(arguments)
    method, recipe, chunk = rest.pop("method", None), rest.pop("recipe", None), rest.pop("chunk", CHUNK)
    settings = {key: rest.pop(key) for key in list(rest) if key in known}
    if type(chunk) is not int or chunk < 1:
        raise RecipeError(f"chunk = {chunk!r}: a positive number of tokens")
    if method in (None, FULL) and recipe is None:
        if settings:
            raise RecipeError(f"{', '.join(settings)}: settings of a method; name it, as in method=turbo")
        return Arguments(None, chunk, rest)
    if method == FULL:
        raise RecipeError("method=full packs nothing: leave out recipe, or name its method")
    return Arguments(find_recipe(method, _read(recipe), settings), chunk, rest)


def _read(recipe: Any) -> Recipe | None:
    return recipe if recipe is None or isinstance(recipe, Recipe) else load_recipe(recipe)
