"""Recipes: which method with which settings, from a name, a YAML file or keywords, checked before anything changes.

A recipe may choose otherwise for some layers, under the key `layers`:

    method: turbo
    v_bits: 2
    layers:
      0-1,7: {v_bits: 4}
      2: {method: kivi, bits: 4}

A choice of the same method stands on the recipe's settings, one of another method on that method's defaults and on
those of the recipe's settings that every method has. What layers must agree in
(`recipe_settings.SHARED`) stands in the recipe alone; everything else is each layer's own: format, window, sinks,
arithmetic. Lists of heads are of the whole model here too.

Settings stand on others in three places: a family's below the recipe's, the recipe's below keywords of `patch`, and all
of them below a layer's. What stands above wins, and a setting for all (`bits`) also wins over what stands below it for
a part (`k_bits`): `Method.left_of`. A layer's choice stays whatever keywords say; `layers={}` leaves all of them out.

A method's defaults, which `patch` takes where no recipe is named, are those that the model's family has for this method
(`qattn_hf.families`). Settings that were given win over them, and `family: false` leaves them out. In a recipe that was
named nothing but its own settings holds, unless it says `family: true`. A layer's other method has its own defaults.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers import PretrainedConfig

from qattn_hf import recipe_files
from qattn_hf.errors import RecipeError, UnsupportedError
from qattn_hf.families import Chosen, find_family
from qattn_hf.messages import cut, named, shown
from qattn_hf.methods import Method, list_methods
from qattn_hf.recipe_files import YAML, is_of_hub, list_recipes, recipe_file
from qattn_hf.recipe_settings import LayerChoice, checked_settings, find_method, layer_choices, unknown
from qattn_hf.spelling import split_method, split_methods
from qattn_hf.tensor_parallel import ALL, Share, own_part
from qattn_hf.yaml_reader import read_yaml
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.support import no_triton, unsupported

DEFAULT_METHOD = "turbo"


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
    """Read a YAML recipe and check it.

    Args:
        source: path of a YAML file, the name of one of the recipes of this package (`turbo`), a folder that holds a
            `qattn.yaml`, or a repository of the hub that does (`org/repo`); settings may follow a colon, as in
            `turbo_sink:bits=2` (see `qattn_hf.spelling`).
        overrides: settings that win over the file's, by the YAML's names, and `family`; see the module.

    Raises:
        RecipeError: no such file, or the hub cannot be reached; an unknown key; a wrong type or value; settings that
            exclude one another. The message names the key, the file and what is allowed.
    """
    if not isinstance(source, (str, Path)):
        raise RecipeError(f"recipe = {shown(source)}: give the path of a YAML file, a folder, or a name")
    if isinstance(source, str) and not os.path.exists(source):
        source, inline = split_method(source)
        overrides = _given_once(inline, overrides)
    path = recipe_file(source)
    where = named(str(path), 300)
    read = read_yaml(path)
    if not isinstance(read, dict) or not isinstance(read.get("method"), str):
        raise RecipeError(f"{where} must be a mapping with the key `method`, one of {', '.join(list_methods())}")
    if other := [key for key in read if not isinstance(key, str)]:
        raise RecipeError(f"{where}: keys are names, not {shown(other[0])}")
    name = read.pop("method")
    left = find_method(name, where).left_of(read, overrides)
    return _build(name, {"family": False, **left, **overrides}, where + _suffix(overrides))


def find_recipe(
    method: str | None, recipe: str | Path | Recipe | None, settings: dict[str, Any], beside: str | None = None
) -> Recipe:
    """The recipe that was asked for, checked: what `patch` and every command call.

    Args:
        method: a method with settings as `qattn_hf.spelling` has it; its name may be a recipe's, or a YAML file. None:
            the recipe's method, or `turbo`.
        recipe: a name or file as `load_recipe` takes it, or a `Recipe`.
        settings: on top of both.
        beside: the folder that a model was loaded from, whose recipe is taken where none is asked for.

    Raises:
        RecipeError: no such method or recipe, with the nearest name and those there are; a setting that cannot be; a
            setting given twice; a method that is not the recipe's.
    """
    name = method
    if isinstance(method, str):
        name, inline = split_method(method)
        settings = _given_once(inline, settings)
    if name is None and recipe is None:
        recipe = recipe_files.beside(beside)
    if recipe is None:
        return _by_name(DEFAULT_METHOD if name is None else name, settings)
    if isinstance(recipe, Recipe):
        chosen = _changed(recipe, settings)
    else:
        chosen = load_recipe(recipe, **settings)
    if name is not None and name != chosen.method:
        raise RecipeError(
            f"method={shown(method)} clashes with {chosen.origin}, whose method is {chosen.method!r}; give one of them"
        )
    return chosen


def find_recipes(texts: Iterable[str]) -> dict[str, Recipe]:
    """Recipes that pack, by how they were spelled: a text is a method with settings, or several with commas between.

    Raises:
        RecipeError: as `find_recipe`. UnsupportedError: a recipe that packs nothing.
    """
    recipes = {text: find_recipe(text, None, {}) for text in split_methods(texts)}
    for recipe in recipes.values():
        check_packs(recipe)
    return recipes


def _by_name(name: Any, settings: dict[str, Any]) -> Recipe:
    """The defaults of the method of this name, or else the recipe."""
    if not isinstance(name, str) or name in list_methods():
        return _build(name, settings, f"defaults of {named(name)}" + _suffix(settings))
    if name not in list_recipes() and Path(name).suffix not in YAML and not os.path.isdir(name) and not is_of_hub(name):
        known = list(dict.fromkeys([*list_methods(), *list_recipes()]))
        raise RecipeError(f"{unknown('method', [name], known)}, or a file that ends in .yaml")
    return load_recipe(name, **settings)


def _changed(recipe: Recipe, settings: dict[str, Any]) -> Recipe:
    """A recipe with other settings on top."""
    if not settings:
        return recipe
    kind = type(recipe.settings)
    given = {"family": recipe.by_family, **kind.left_of(recipe.given(), settings), **settings}
    made = _build(recipe.method, given, recipe.origin + _suffix(settings))
    return dataclasses.replace(made, family=recipe.family and recipe.family.below(kind, settings))


def _given_once(inline: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Settings behind a method's colon together with those given beside it."""
    if twice := [key for key in inline if key in settings]:
        raise RecipeError(f"{named(twice[0])} is given twice, behind the method's name and beside it; keep one of them")
    return {**inline, **settings}


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


def _build(name: str, settings: dict[str, Any], origin: str) -> Recipe:
    by_family = settings.get("family", True)
    if not isinstance(by_family, bool):
        raise RecipeError(f"{origin}: family = {shown(by_family)}: give true or false")
    own = {key: value for key, value in settings.items() if key not in ("layers", "family")}
    base = checked_settings(find_method(name, origin), own, origin)
    return Recipe(base, origin, layer_choices(base, settings.get("layers"), origin), by_family)
