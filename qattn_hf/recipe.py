"""Recipes: which method with which settings, from a name, a YAML file or keywords, checked before anything changes.

A recipe may choose otherwise for some layers, under the key `layers`:

    method: turbo
    v_bits: 2
    layers:
      0-1,7: {v_bits: 4}
      2: {method: kivi, bits: 4}

A choice of the same method stands on the recipe's settings, one of another method on that method's defaults and on
those of the recipe's settings that every method has. What layers must agree in (`SHARED`) stands in the recipe alone;
everything else is each layer's own: format, window, sinks, arithmetic. Lists of heads are of the whole model here too.

Settings stand on others in three places: a family's below the recipe's, the recipe's below keywords of `patch`, and all
of them below a layer's. What stands above wins, and a setting for all (`bits`) also wins over what stands below it for
a part (`k_bits`): `Method.left_of`. A layer's choice stays whatever keywords say; `layers={}` leaves all of them out.

A method's defaults, which `patch` takes where no recipe is named, are those that the model's family has for this method
(`qattn_hf.families`). Settings that were given win over them, and `family: false` leaves them out. In a recipe that was
named nothing but its own settings holds, unless it says `family: true`. A layer's other method has its own defaults.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from transformers import PretrainedConfig

from qattn_hf.assets import configs_dir
from qattn_hf.errors import RecipeError, UnsupportedError
from qattn_hf.families import Chosen, find_family
from qattn_hf.messages import cut, named, shown
from qattn_hf.methods import Method, get_method, list_methods
from qattn_hf.share import ALL, Share, own_part
from qattn_hf.yaml_reader import read_yaml
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.support import no_triton, unsupported

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


@dataclass(frozen=True)
class Recipe:
    """A method with its settings, where they come from, and the layers that have others.

    Attributes:
        by_family: whether what was not given is still to be what a model's family has; see the module.
        family: what the model's family gave, once `for_model` found it, less what was set in its place.
    """

    settings: Method
    origin: str
    choices: tuple[LayerChoice, ...] = ()
    by_family: bool = False
    family: Chosen | None = None

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.settings.name()

    def given(self) -> dict[str, Any]:
        """What was set, as keywords of `patch`."""
        layers = {choice.where: choice.given for choice in self.choices}
        return {**self.settings.model_dump(exclude_unset=True), **({"layers": layers} if layers else {})}

    def from_family(self) -> dict[str, Any]:
        """Those of the settings in use that the model's family gave."""
        return {} if self.family is None else self.family.section.settings

    def settings_of(self, layer: int) -> Method:
        """The settings that hold in a layer."""
        return next((choice.settings for choice in self.choices if layer in choice.layers), self.settings)

    def for_model(self, config: PretrainedConfig) -> Recipe:
        """This recipe with the defaults that the model's family has for its method, if it takes them.

        Raises:
            RecipeError: if they clash with what was given; the message says how to leave them out.
        """
        found = find_family(config.get_text_config(decoder=True).model_type, self.method) if self.by_family else None
        if found is None:
            return self
        found = found.below(type(self.settings), self.given())
        origin = f"{self.origin} for {found}"
        try:
            made = _build(self.method, {**found.section.settings, **self.given()}, origin)
        except RecipeError as error:
            ours = ", ".join(f"{k}={v!r}" for k, v in found.section.settings.items())
            raise RecipeError(f"{error} ({ours} is the family's: give it yourself, or family=False)") from None
        return dataclasses.replace(made, by_family=False, family=found)

    def as_yaml(self) -> str:
        """The text of a file that `load_recipe` reads back to the same recipe."""
        said = {"method": self.method, **self.given(), **({"family": True} if self.by_family else {})}
        return yaml.safe_dump(said, sort_keys=False, default_flow_style=None)

    def layer_specs(self, config: PretrainedConfig, device_type: str = "cpu", share: Share = ALL) -> list[LayerSpec]:
        """What each layer of a model with this config formats, and who computes it on this type of device.

        Of a model that is split over processes, the part of this one.

        Raises:
            RecipeError: if a setting does not fit the model, as a list of heads of another length, or Triton kernels
                where they cannot run.
        """
        text = config.get_text_config(decoder=True)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        specs, layers = [], text.num_hidden_layers
        for choice in self.choices:
            if max(choice.layers) >= layers:
                where = named(choice.where)
                raise RecipeError(f"{self.origin}: layers {where}: the model has layers 0 to {layers - 1}")
        try:
            for i in range(layers):
                spec = self.settings_of(i).layer_spec(i, layers, heads)
                spec = own_part(spec, heads, share)
                reason = no_triton(device_type) or unsupported(spec, heads, text.num_attention_heads, dim, dim)
                specs.append(dataclasses.replace(spec, impl=self.settings.chosen_impl(device_type, reason)))
        except ValueError as error:
            raise RecipeError(f"{self.origin}: {error}") from None
        return specs


def load_recipe(source: str | Path, **overrides: Any) -> Recipe:
    """Read a YAML recipe, or the defaults of a method, and check it.

    Args:
        source: path of a YAML file, or the name of one of the recipes of this package (`turbo`).
        overrides: settings that win over the file's, by the YAML's names, and `family`; see the module.

    Raises:
        RecipeError: no such file; an unknown key; a wrong type or value; settings that exclude one another. The
            message names the key, the file and what is allowed.
    """
    if not isinstance(source, (str, Path)):
        raise RecipeError(f"recipe = {shown(source)}: give the path of a YAML file, or a name")
    path, ours = Path(source), sorted(path.stem for path in configs_dir().glob("*.yaml"))
    if path.suffix not in (".yaml", ".yml"):
        if str(source) not in ours:
            raise RecipeError(f"{_unknown('recipe', [str(source)], ours)}, or a file that ends in .yaml")
        path = configs_dir() / f"{source}.yaml"
    where = named(str(path), 300)
    if not os.path.isfile(path):
        what = ", which is a directory" if os.path.isdir(path) else ""
        raise RecipeError(f"no recipe at {where}{what}; recipes of this package: {', '.join(ours)}")
    read = read_yaml(path)
    if not isinstance(read, dict) or not isinstance(read.get("method"), str):
        raise RecipeError(f"{where} must be a mapping with the key `method`, one of {', '.join(list_methods())}")
    if other := [key for key in read if not isinstance(key, str)]:
        raise RecipeError(f"{where}: keys are names, not {shown(other[0])}")
    name = read.pop("method")
    left = _method(name, where).left_of(read, overrides)
    return _build(name, {"family": False, **left, **overrides}, where + _suffix(overrides))


def find_recipe(method: str | None, recipe: str | Path | Recipe | None, settings: dict[str, Any]) -> Recipe:
    """The recipe that `patch` was asked for: `recipe`, or the defaults of `method`, with `settings` on top."""
    if recipe is None:
        name = "turbo" if method is None else method
        return _build(name, settings, f"defaults of {named(name)}" + _suffix(settings))
    if isinstance(recipe, Recipe):
        if settings:
            kind = type(recipe.settings)
            given = {"family": recipe.by_family, **kind.left_of(recipe.given(), settings), **settings}
            made = _build(recipe.method, given, recipe.origin + _suffix(settings))
            recipe = dataclasses.replace(made, family=recipe.family and recipe.family.below(kind, settings))
        found = recipe
    else:
        found = load_recipe(recipe, **settings)
    if method is not None and method != found.method:
        raise RecipeError(
            f"method={shown(method)} clashes with {found.origin}, whose method is {found.method!r}; give one of them"
        )
    return found


def check_packs(recipe: Recipe) -> None:
    """Refuse a recipe that leaves keys and values to transformers' own caches.

    Raises:
        UnsupportedError: with what to do instead.
    """
    if not recipe.settings.packs():
        raise UnsupportedError(
            f"{recipe.origin} packs nothing (cache='model'): transformers' own caches hold keys and values; take "
            "cache='quantized', or patch a model and pass it a DynamicCache, a StaticCache or none"
        )


def _suffix(overrides: dict[str, Any]) -> str:
    """How the overrides read in an origin, those of layers without their settings."""
    said = [f"{named(k)}={shown(v)}" for k, v in overrides.items() if k != "layers"]
    if isinstance(layers := overrides.get("layers"), dict):
        said.append(f"others in layers {', '.join(map(named, layers))}")
    return cut(" with " + ", ".join(said), 400) if said else ""


def _unknown(kind: str, names: list[str], allowed: list[str]) -> str:
    said = []
    for name in names[:FEW]:
        close = difflib.get_close_matches(name[:100], allowed, 1)
        said.append(f"unknown {kind} {shown(name)}{f', did you mean {close[0]!r}?' if close else ';'}")
    more = [f"{len(names) - FEW} more;"] if len(names) > FEW else []
    return " ".join([*said, *more, f"allowed: {', '.join(allowed)}"])


def _build(name: str, settings: dict[str, Any], origin: str) -> Recipe:
    by_family = settings.get("family", True)
    if not isinstance(by_family, bool):
        raise RecipeError(f"{origin}: family = {shown(by_family)}: give true or false")
    own = {key: value for key, value in settings.items() if key not in ("layers", "family")}
    base = _settings(_method(name, origin), own, origin)
    return Recipe(base, origin, _choices(base, settings.get("layers"), origin), by_family)


def _method(name: Any, origin: str) -> type[Method]:
    if not isinstance(name, str):
        raise RecipeError(f"{origin}: method = {shown(name)}; allowed: {', '.join(list_methods())}")
    if name not in list_methods():
        raise RecipeError(f"{origin}: {_unknown('method', [name], list_methods())}")
    return get_method(name)


def _settings(method: type[Method], settings: dict[str, Any], origin: str) -> Method:
    try:
        return method(**settings)
    except ValidationError as error:
        raise RecipeError(_explain(error, method, origin)) from None


def _choices(base: Method, layers: Any, origin: str) -> tuple[LayerChoice, ...]:
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
    method = _method(given.get("method", base.name()), here)
    own = {key: value for key, value in given.items() if key != "method"}
    kept = base.model_dump(exclude_unset=True)
    if method is not type(base):
        kept = {key: value for key, value in kept.items() if key in Method.model_fields}
    return _settings(method, {**method.left_of(kept, own), **own}, here)


def _explain(error: ValidationError, method: type[Method], origin: str) -> str:
    """What is wrong in one message: key, value, what is allowed, and where it stands."""
    lines, unknown = [], []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"][:1])
        if item["type"] == "extra_forbidden":
            unknown.append(key)
        elif key:
            hint = " (YAML reads 1e-4 as text; write 1.0e-4)" if item["type"] == "float_type" else ""
            lines.append(f"{key} = {shown(item['input'])}: {item['msg']}{hint}")
        else:
            lines.append(item["msg"].removeprefix("Value error, "))
    lines = list(dict.fromkeys(lines))
    more = [f"{len(lines) - FEW} more"] if len(lines) > FEW else []
    wrong = [*lines[:FEW], *more, *([_unknown("key", unknown, sorted(method.model_fields))] if unknown else [])]
    return f"{origin}: " + "; ".join(wrong)
