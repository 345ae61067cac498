"""Check the settings of a recipe: for all layers by their method's class, and for some layers under `layers`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qattn_hf.errors import RecipeError
from qattn_hf.messages import named, shown
from qattn_hf.methods import get_method, is_method, list_methods

if TYPE_CHECKING:
    from pydantic import ValidationError

    from qattn_hf.methods import Method

# one decode step runs through all layers, a crop removes the same tokens from each, all windows share one mask, and all
# layers share the memory
SHARED = ("decode", "impl", "crop_horizon", "sliding", "memory")
MOST_LAYERS = 4096  # limit for a recipe's layers; models have a few hundred
FEW = 5  # mistakes listed in a message; the rest are counted


@dataclass(frozen=True)
class LayerChoice:
    """An entry of `layers`: layers with other settings than the recipe's.

    Attributes:
        where: its key as written, such as `0-1,7`.
        layers: the layer indices of that key.
        settings: all settings of these layers, inherited ones included.
        given: the settings written in the entry.
    """

    where: str
    layers: tuple[int, ...]
    settings: Method
    given: dict[str, Any]


def unknown(kind: str, names: list[str], allowed: list[str]) -> str:
    """Make a message about unknown names of a kind, each with the nearest allowed name, and all allowed names."""
    parts = []
    for name in names[:FEW]:
        close = difflib.get_close_matches(name[:100], allowed, 1)
        parts.append(f"unknown {kind} {shown(name)}{f', did you mean {close[0]!r}?' if close else ';'}")
    more = [f"{len(names) - FEW} more;"] if len(names) > FEW else []
    return " ".join([*parts, *more, f"allowed: {', '.join(allowed)}"])


def find_method(name: Any, origin: str) -> type[Method]:
    """Return the settings class of a method.

    Raises:
        RecipeError: the method does not exist. The message begins with `origin` and lists the methods.
    """
    if not isinstance(name, str):
        raise RecipeError(f"{origin}: method = {shown(name)}; allowed: {', '.join(list_methods())}")
    if not is_method(name):
        raise RecipeError(f"{origin}: {unknown('method', [name], list_methods())}")
    return get_method(name)


def checked_settings(method: type[Method], settings: dict[str, Any], origin: str) -> Method:
    """Return a method's settings, checked.

    Raises:
        RecipeError: an unknown key, a wrong type or value. The message begins with `origin` and names each mistake.
    """
    from pydantic import ValidationError

    try:
        return method(**settings)
    except ValidationError as error:
        raise RecipeError(_explain(error, method, origin)) from None


def layer_choices(base: Method, layers: Any, origin: str) -> tuple[LayerChoice, ...]:
    """Return the entries of `layers`, checked.

    Args:
        base: the recipe's settings for all layers.
        layers: a mapping from layers (`0-1,7`) to settings, or None.

    Raises:
        RecipeError: `layers` is not such a mapping, a layer is in two entries, a setting is invalid, or all layers must
            share it.
    """
    if layers is None:
        return ()
    if not isinstance(layers, dict) or not all(isinstance(given, dict) for given in layers.values()):
        raise RecipeError(f"{origin}: layers = {shown(layers)}: give settings by layers, such as 0-3: {{bits: 2}}")
    choices: list[LayerChoice] = []
    entry_of: dict[int, str] = {}
    for key, given in layers.items():
        where = key if isinstance(key, str) else shown(key)
        here = f"{origin}, layers {named(where)}"
        chosen = []
        for layer in _indices(where, here):
            if layer in entry_of:
                raise RecipeError(f"{here}: layer {layer} is under {named(entry_of[layer])} too; give it once")
            entry_of[layer] = where
            chosen.append(layer)
        choices.append(LayerChoice(where, tuple(chosen), _layer_settings(base, given, here), given))
    if choices and not all(settings.packs() for settings in (base, *(choice.settings for choice in choices))):
        raise RecipeError(f"{origin}: cache='model' packs no layer, and `layers` needs one; take cache='quantized'")
    return tuple(choices)


def _indices(where: str, here: str) -> Iterator[int]:
    """Yield the layer indices of a key: `0-2,5` -> 0, 1, 2, 5. A generator, as a key may name very many layers."""
    for part in where.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})\s*(?:-\s*([0-9]{1,18})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise RecipeError(f"{here}: give layers as a number, a range or several of them, such as 0-3,7")
        if last >= MOST_LAYERS:
            raise RecipeError(f"{here}: layer {last}; layers are 0 to {MOST_LAYERS - 1} at most")
        yield from range(first, last + 1)


def _layer_settings(base: Method, given: dict[str, Any], here: str) -> Method:
    """Return the settings of an entry of `layers`: given ones, and those inherited from the recipe."""
    if other := [key for key in given if not isinstance(key, str)]:
        raise RecipeError(f"{here}: keys are names, not {shown(other[0])}")
    if shared := [key for key in given if key in SHARED]:
        raise RecipeError(f"{here}: {shared[0]} applies to all layers; move it out of `layers`")
    method = find_method(given.get("method", base.name()), here)
    own = {key: value for key, value in given.items() if key != "method"}
    inherited = base.model_dump(exclude_unset=True)
    if method is not type(base):
        from qattn_hf.methods import Method

        inherited = {key: value for key, value in inherited.items() if key in Method.model_fields}
    return checked_settings(method, {**method.not_overridden(inherited, own), **own}, here)


def _explain(error: ValidationError, method: type[Method], origin: str) -> str:
    """Make one message about all mistakes after `origin`: key, value and what is allowed."""
    lines, unknown_keys = [], []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"][:1])
        if item["type"] == "extra_forbidden":
            unknown_keys.append(key)
        elif key:
            hint = " (YAML reads 1e-4 as text; write 1.0e-4)" if item["type"] == "float_type" else ""
            lines.append(f"{key} = {shown(item['input'])}: {item['msg']}{hint}")
        else:
            lines.append(item["msg"].removeprefix("Value error, "))
    lines = list(dict.fromkeys(lines))
    more = [f"{len(lines) - FEW} more"] if len(lines) > FEW else []
    if unknown_keys:
        more.append(unknown("key", unknown_keys, sorted(method.model_fields)))
    return f"{origin}: " + "; ".join([*lines[:FEW], *more])
