"""Recipes: a method with settings, from a name, a YAML file or keywords, checked before anything changes.

A recipe may have other settings for some layers, under the key `layers`:

    method: turbo
    v_bits: 2
    layers:
      0-1,7: {v_bits: 4}
      2: {method: kivi, bits: 4}

An entry of `layers` inherits the recipe's settings. With another method it inherits the settings that every method has,
and uses that method's defaults for the rest. Settings that all layers must share (`recipe_settings.SHARED`: `decode`,
`impl`, `crop_horizon`, `sliding`, `memory`) belong to the recipe itself. Lists of heads, such as `k_low_heads`, are
always lists for all layers.

Precedence, lowest first: the method's defaults, defaults of the model's family, the recipe, keywords of `patch`, an
entry of `layers`. The higher one wins, even if it sets both sides (`bits`) and the lower one sets a single side
(`k_bits`): `Method.not_overridden`. Keywords leave entries of `layers` unchanged. `layers={}` removes all entries.

The defaults of a model's family (`qattn_hf.recipes.families`) apply if no recipe is named. `family: false` skips them.
A named recipe uses only its settings, unless it says `family: true`. Another method in `layers` has no family defaults.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from transformers import PretrainedConfig

from qattn_hf.errors import RecipeError, UnsupportedError
from qattn_hf.layer.memory_budget import shared
from qattn_hf.messages import cut, named, shown
from qattn_hf.methods import Method, get_method, is_method, list_methods
from qattn_hf.model import latent
from qattn_hf.model.heads import head_sizes
from qattn_hf.model.layer_kinds import HybridLayerSpec, ModelLayerSpec, hybrid_states, model_layers, of_method
from qattn_hf.model.tensor_parallel import ALL, Shard, shard_spec
from qattn_hf.recipes import recipe_files
from qattn_hf.recipes.chosen import Chosen
from qattn_hf.recipes.families import FamilyDefaults, find_family
from qattn_hf.recipes.recipe_files import check_name, recipe_file
from qattn_hf.recipes.recipe_files import list_recipes as list_recipes  # a name of this module for its users
from qattn_hf.recipes.recipe_settings import LayerChoice, checked_settings, find_method, layer_choices
from qattn_hf.recipes.sliding import decide
from qattn_hf.recipes.spelling import split_method, split_methods
from qattn_hf.recipes.yaml_reader import read_yaml
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.support import no_triton, unsupported

DEFAULT_METHOD = "turbo"


@dataclass(frozen=True)
class Recipe:
    """A method with its settings, checked. `load_recipe` reads one. `patch` and every command take one.

    Attributes:
        settings: the method's class with the values of its settings.
        origin: source of the settings, for messages and reports: a file, or the defaults of a method.
        choices: the layers that have other settings.
        by_family: whether `for_model` adds the defaults of the model's family.
        family: the family's defaults in use after `for_model`, else None.
        chosen: reasons of the choice if `patch` got a budget and no method, else None.
    """

    settings: Method
    origin: str
    choices: tuple[LayerChoice, ...] = ()
    by_family: bool = False
    family: FamilyDefaults | None = None
    chosen: Chosen | None = dataclasses.field(default=None, compare=False)

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.settings.name()

    def given(self) -> dict[str, Any]:
        """Return the settings that were given explicitly, including `layers`, as keywords of `patch`."""
        layers = {choice.where: choice.given for choice in self.choices}
        return {**self.settings.model_dump(exclude_unset=True), **({"layers": layers} if layers else {})}

    def from_family(self) -> dict[str, Any]:
        """Return the settings in use that come from the model's family, or an empty dict."""
        return {} if self.family is None else self.family.section.settings

    def settings_of(self, layer: int) -> Method:
        """Return the settings of one layer, by its index."""
        return next((choice.settings for choice in self.choices if layer in choice.layers), self.settings)

    def for_model(self, config: PretrainedConfig) -> Recipe:
        """Return this recipe with the defaults of the model's family for its method, if `by_family`.

        Args:
            config: the model's config, whose text config names the `model_type`.

        Raises:
            RecipeError: the defaults contradict a given setting. The message says how to skip the defaults.
        """
        defaults = find_family(config.get_text_config(decoder=True).model_type, self.method) if self.by_family else None
        if defaults is None:
            return self
        defaults = defaults.below(type(self.settings), self.given())
        origin = f"{self.origin} for {defaults}"
        try:
            recipe = _build(self.method, {**defaults.section.settings, **self.given()}, origin)
        except RecipeError as error:
            settings = ", ".join(f"{k}={v!r}" for k, v in defaults.section.settings.items())
            raise RecipeError(f"{error} ({settings} is the family's: give it yourself, or family=False)") from None
        return dataclasses.replace(recipe, by_family=False, family=defaults)

    def _unquantized(self) -> Method:
        """Return the settings of windows with `sliding="exact"`: settings of the method `none`."""
        horizon: dict[str, Any] = {"crop_horizon": self.settings.crop_horizon}
        return get_method("none")(**horizon)

    def method_of(self, layer: int, spec: LayerSpec) -> str:
        """Return the name of a packed layer's method."""
        return (self.settings_of(layer) if of_method(spec) else self._unquantized()).name()

    def why_no_pool(self, layer: int, spec: LayerSpec) -> str | None:
        """Return why a packed layer lacks the pool of sinks that is the method's default, or None."""
        return self.settings_of(layer).why_no_pool(spec) if of_method(spec) else None

    def as_yaml(self) -> str:
        """Return YAML text from which `load_recipe` reads the same recipe again."""
        content = {"method": self.method, **self.given(), **({"family": True} if self.by_family else {})}
        return yaml.safe_dump(content, sort_keys=False, default_flow_style=None)

    def layer_specs(
        self, config: PretrainedConfig, device_type: str = "cpu", shard: Shard = ALL, paged: bool = False
    ) -> list[LayerSpec | ModelLayerSpec]:
        """Return one spec for each layer of a model. An unpacked layer has a `ModelLayerSpec`.

        A packed layer has a `LayerSpec`: formats, window, arithmetic, and kernels or reference.

        Args:
            config: the model's config.
            device_type: `cuda` or `cpu`, where the model will run.
            shard: the KV heads of this process, for a model split by tensor parallelism.
            paged: True for continuous batching, where no window stays in a stock cache.

        Raises:
            RecipeError: a setting does not fit the model: a list of heads of another length, settings for layers that
                are all unpacked, `impl="triton"` where no kernel can run, or a method without support for latent
                attention.
            UnsupportedError: a layer's type is unsupported.
        """
        own, states = model_layers(config), hybrid_states(config)
        layers = len(own)

        def packed(i: int, settings: Method | None = None) -> LayerSpec:
            _, heads, dim, v_dim, is_latent = head_sizes(config, i)
            settings = settings or self.settings_of(i)
            spec = settings.layer_spec(i, layers, heads)
            spec = settings.without_default_pool(spec) if is_latent or own[i] else spec
            spec = latent.layer_spec(spec, settings.name()) if is_latent else spec
            spec = shard_spec(spec, heads, shard)
            reason = no_triton(device_type) or unsupported(spec, heads, dim, v_dim)
            spec = dataclasses.replace(spec, impl=self.settings.chosen_impl(device_type, reason))
            of_layer = {field.name: getattr(spec, field.name) for field in dataclasses.fields(LayerSpec)}
            return HybridLayerSpec(**of_layer, states=states[i]) if states[i] else spec

        self._check_choices(layers)
        try:
            unquantized = partial(packed, settings=self._unquantized())
            decided = decide(own, self.settings, device_type, packed, unquantized, paged)
            specs = shared([packed(i) if spec is None else spec for i, spec in enumerate(decided)])
        except UnsupportedError:
            raise
        except ValueError as error:
            raise RecipeError(f"{self.origin}: {error}") from None
        self._check_packed(specs)
        one: dict[Any, Any] = {}  # layers with equal specs share one object, which is faster to compare on the host
        return [one.setdefault(spec, spec) for spec in specs]

    def _check_choices(self, layers: int) -> None:
        """Refuse settings for layers that a model of `layers` layers does not have."""
        for choice in self.choices:
            if max(choice.layers) >= layers:
                where = named(choice.where)
                raise RecipeError(f"{self.origin}: layers {where}: the model has layers 0 to {layers - 1}")

    def _check_packed(self, specs: list[LayerSpec | ModelLayerSpec]) -> None:
        """Refuse settings for layers if none of these layers is packed."""
        for choice in self.choices:
            if not any(of_method(specs[i]) for i in choice.layers):
                why = f"they have {specs[min(choice.layers)]}"
                raise RecipeError(f"{self.origin}: layers {named(choice.where)} are not packed: {why}")


def load_recipe(source: str | Path, **overrides: Any) -> Recipe:
    """Read a recipe from a YAML file and check it.

    Args:
        source: path of a YAML file, the name of a bundled recipe (`turbo_sink`), a folder with a `qattn.yaml`, or a hub
            repository that has one (`org/repo`). Settings may follow a colon, as in `turbo_sink:bits=2` (see
            `qattn_hf.recipes.spelling`).
        overrides: settings that override the file, by the names of the YAML keys; also `layers` and `family` (see
            `qattn_hf.recipes.recipe`).

    Returns:
        A `Recipe`, for `patch(model, recipe=...)`.

    Raises:
        RecipeError: the file is missing, the hub cannot be reached, a key is unknown, a type or value is wrong, or
            settings contradict one another. The message names the key, the file and what is allowed.
    """
    if not isinstance(source, (str, Path)):
        raise RecipeError(f"recipe = {shown(source)}: give the path of a YAML file, a folder, or a name")
    if isinstance(source, str) and not os.path.exists(source):
        source, inline = split_method(source)
        overrides = _given_once(inline, overrides)
    path = recipe_file(source)
    where = named(str(path), 300)
    content = read_yaml(path)
    if not isinstance(content, dict) or not isinstance(content.get("method"), str):
        raise RecipeError(f"{where} must be a mapping with the key `method`, one of {', '.join(list_methods())}")
    if other := [key for key in content if not isinstance(key, str)]:
        raise RecipeError(f"{where}: keys are names, not {shown(other[0])}")
    name = content.pop("method")
    settings = find_method(name, where).not_overridden(content, overrides)
    return _build(name, {"family": False, **settings, **overrides}, where + _suffix(overrides))


def find_recipe(
    method: str | None, recipe: str | Path | Recipe | None, settings: dict[str, Any], checkpoint: str | None = None
) -> Recipe:
    """Return the checked recipe for the arguments of `patch` or the options of a command.

    Args:
        method: a method's or recipe's name or a YAML file, with or without settings (`turbo:bits=2`, see
            `qattn_hf.recipes.spelling`). None: the recipe's method, or `turbo`.
        recipe: a name, file, folder or repository as `load_recipe` takes it, or a `Recipe`.
        settings: settings that override both.
        checkpoint: folder that the model was loaded from. Its `qattn.yaml` is used if method and recipe are None.

    Raises:
        RecipeError: the method or recipe is unknown (the message has the nearest name), a setting is invalid or given
            twice, or the method differs from the recipe's.
    """
    name = method
    if isinstance(method, str):
        name, inline = split_method(method)
        settings = _given_once(inline, settings)
    if name is None and recipe is None:
        recipe = recipe_files.checkpoint_recipe(checkpoint)
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
    """Return several recipes by their spelling, for comparisons.

    Args:
        texts: each a method with settings (`turbo:bits=2`), or several of them separated by commas.

    Raises:
        RecipeError: an unknown method, recipe or setting, or an invalid value.
        UnsupportedError: a recipe packs nothing (`cache="model"`).
    """
    recipes = {text: find_recipe(text, None, {}) for text in split_methods(texts)}
    for recipe in recipes.values():
        check_packs(recipe)
    return recipes


def _by_name(name: Any, settings: dict[str, Any]) -> Recipe:
    """Return the defaults of the method of this name, or else the recipe of this name."""
    if not isinstance(name, str) or is_method(name):
        return _build(name, settings, f"defaults of {named(name)}" + _suffix(settings))
    check_name(name)
    return load_recipe(name, **settings)


def _changed(recipe: Recipe, settings: dict[str, Any]) -> Recipe:
    """Return a recipe with `settings` overriding the recipe's settings."""
    if not settings:
        return recipe
    kind = type(recipe.settings)
    given = {"family": recipe.by_family, **kind.not_overridden(recipe.given(), settings), **settings}
    changed = _build(recipe.method, given, recipe.origin + _suffix(settings))
    return dataclasses.replace(changed, family=recipe.family and recipe.family.below(kind, settings))


def _given_once(inline: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Merge settings written after a method's colon with keywords. A setting given in both places is refused."""
    if twice := [key for key in inline if key in settings]:
        raise RecipeError(f"{named(twice[0])} is given twice, in the method's text and separately; keep one of them")
    return {**inline, **settings}


def check_packs(recipe: Recipe) -> None:
    """Refuse a recipe that packs nothing and leaves keys and values to Transformers' stock caches.

    Raises:
        UnsupportedError: the message says what to do instead.
    """
    if not recipe.settings.packs():
        raise UnsupportedError(
            f"{recipe.origin} packs nothing (cache='model'): transformers' own caches hold keys and values; take "
            "cache='quantized', or patch a model and pass it a DynamicCache, a StaticCache or none"
        )


def _suffix(overrides: dict[str, Any]) -> str:
    """Format overrides as text for an origin. For `layers` only the layers are named."""
    parts = [f"{named(k)}={shown(v)}" for k, v in overrides.items() if k != "layers"]
    if isinstance(layers := overrides.get("layers"), dict):
        parts.append(f"others in layers {', '.join(map(named, layers))}")
    return cut(" with " + ", ".join(parts), 400) if parts else ""


def _build(name: str, settings: dict[str, Any], origin: str) -> Recipe:
    by_family = settings.get("family", True)
    if not isinstance(by_family, bool):
        raise RecipeError(f"{origin}: family = {shown(by_family)}: give true or false")
    own = {key: value for key, value in settings.items() if key not in ("layers", "family")}
    base = checked_settings(find_method(name, origin), own, origin)
    return Recipe(base, origin, layer_choices(base, settings.get("layers"), origin), by_family)
