"""The settings of a recipe checked: of all layers by their method's class, and of some layers under `layers`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from qattn_hf.errors import RecipeError
from qattn_hf.messages import named, shown
from qattn_hf.methods import Method, get_method, list_methods

# one decode step runs through all layers, and a crop takes the same tokens back in each
SHARED = ("decode", "impl", "crop_horizon")
MOST_LAYERS = 4096  # that a recipe may name; models have some hundred
FEW = 5  # mistakes that a message lists; it counts the others


@dataclass(frozen=True)
class LayerChoice:
    """What some layers take in place of the recipe's own settings.

    Attributes:
        where: as it was written, `0-1,7`.
        layers: their indices.
        settings: all of them, those of the recipe that hold here too included.
        given: those that were written.
    """

    where: str
    layers: tuple[int, ...]
    settings: Method
    given: dict[str, Any]


def unknown(kind: str, names: list[str], allowed: list[str]) -> str:
    said = []
    for name in names[:FEW]:
        close = difflib.get_close_matches(name[:100], allowed, 1)
        said.append(f"unknown {kind} {shown(name)}{f', did you mean {close[0]!r}?' if close else ';'}")
    more = [f"{len(names) - FEW} more;"] if len(names) > FEW else []
    return " ".join([*said, *more, f"allowed: {', '.join(allowed)}"])


def find_method(name: Any, origin: str) -> type[Method]:
    if not isinstance(name, str):
        raise RecipeError(f"{origin}: method = {shown(name)}; allowed: {', '.join(list_methods())}")
    if name not in list_methods():
        raise RecipeError(f"{origin}: {unknown('method', [name], list_methods())}")
    return get_method(name)


def checked_settings(method: type[Method], settings: dict[str, Any], origin: str) -> Method:
    try:
        return method(**settings)
    except ValidationError as error:
        raise RecipeError(_explain(error, method, origin)) from None


def layer_choices(base: Method, layers: Any, origin: str) -> tuple[LayerChoice, ...]:
    """The checked entries of `layers`."""
    if layers is None:
        return ()
    if not isinstance(layers, dict) or not all(isinstance(given, dict) for given in layers.values()):
        raise RecipeError(f"{origin}: layers = {shown(layers)}: give settings by layers, such as 0-3: {{bits: 2}}")
    found: list[LayerChoice] = []
    taken: dict[int, str] = {}
    for key, given in layers.items():
        where = key if isinstance(key, str) else shown(key)
        here = f"{origin}, layers {named(where)}"
        chosen = []
        for layer in _indices(where, here):
            if layer in taken:
                raise RecipeError(f"{here}: layer {layer} stands under {named(taken[layer])} too; give it once")
            taken[layer] = where
            chosen.append(layer)
        found.append(LayerChoice(where, tuple(chosen), _layer_settings(base, given, here), given))
    if found and not all(settings.packs() for settings in (base, *(choice.settings for choice in found))):
        raise RecipeError(f"{origin}: cache='model' packs no layer, so layers cannot choose; take cache='quantized'")
    return tuple(found)


def _indices(where: str, here: str) -> Iterator[int]:
    """`0-2,5` -> 0, 1, 2, 5, one by one, since somebody may write far more than there are."""
    for part in where.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})\s*(?:-\s*([0-9]{1,18})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise RecipeError(f"{here}: give layers as a number, a range or several of them, such as 0-3,7")
        if last >= MOST_LAYERS:
            raise RecipeError(f"{here}: layer {last}; layers are 0 to {MOST_LAYERS - 1} at most")
        yield from range(first, last + 1)


def _layer_settings(base: Method, given: dict[str, Any], here: str) -> Method:
    """The settings of some layers on top of the recipe's; see the module."""
    if other := [key for key in given if not isinstance(key, str)]:
        raise RecipeError(f"{here}: keys are names, not {shown(other[0])}")
    if shared := [key for key in given if key in SHARED]:
        raise RecipeError(f"{here}: {shared[0]} is of all layers alike; give it beside method")
    method = find_method(given.get("method", base.name()), here)
    own = {key: value for key, value in given.items() if key != "method"}
    kept = base.model_dump(exclude_unset=True)
    if method is not type(base):
        kept = {key: value for key, value in kept.items() if key in Method.model_fields}
    return checked_settings(method, {**method.left_of(kept, own), **own}, here)


def _explain(error: ValidationError, method: type[Method], origin: str) -> str:
    """What is wrong in one message: key, value, what is allowed, and where it stands."""
    lines, strange = [], []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"][:1])
        if item["type"] == "extra_forbidden":
            strange.append(key)
        elif key:
            hint = " (YAML reads 1e-4 as text; write 1.0e-4)" if item["type"] == "float_type" else ""
            lines.append(f"{key} = {shown(item['input'])}: {item['msg']}{hint}")
        else:
            lines.append(item["msg"].removeprefix("Value error, "))
    lines = list(dict.fromkeys(lines))
    more = [f"{len(lines) - FEW} more"] if len(lines) > FEW else []
    wrong = [*lines[:FEW], *more, *([unknown("key", strange, sorted(method.model_fields))] if strange else [])]
    return f"{origin}: " + "; ".join(wrong)
