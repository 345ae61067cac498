"""Recipes: which method with which settings, from a name, a YAML file or keywords, checked before anything changes."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from transformers import PretrainedConfig

from qattn_hf.assets import configs_dir
from qattn_hf.errors import RecipeError, UnsupportedError
from qattn_hf.methods import Method, get_method, list_methods
from qattn_kernels.spec import LayerSpec
from qattn_kernels.support import no_triton, unsupported


@dataclass(frozen=True)
class Recipe:
    """A method with its settings, and where they come from."""

    settings: Method
    origin: str

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.settings.name()

    def layer_specs(self, config: PretrainedConfig, device_type: str = "cpu") -> list[LayerSpec]:
        """What each layer of a model with this config stores, and who computes it on this type of device.

        Raises:
            RecipeError: if a setting does not fit the model, as a list of heads of another length, or Triton kernels
                where they cannot run.
        """
        text = config.get_text_config(decoder=True)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        specs = []
        try:
            for i in range(text.num_hidden_layers):
                spec = self.settings.layer_spec(i, text.num_hidden_layers, heads)
                reason = no_triton(device_type) or unsupported(spec, heads, text.num_attention_heads, dim, dim)
                specs.append(dataclasses.replace(spec, impl=self.settings.chosen_impl(device_type, reason)))
        except ValueError as error:
            raise RecipeError(f"{self.origin}: {error}") from None
        return specs


def load_recipe(source: str | Path, **overrides: Any) -> Recipe:
    """Read a YAML recipe, or the defaults of a method, and check it.

    Args:
        source: path of a YAML file, or the name of one of the recipes of this package (`turbo`).
        overrides: settings that win over the file's, by the YAML's names.

    Raises:
        RecipeError: no such file; an unknown key; a wrong type or value; settings that exclude one another. The
            message names the key, the file and what is allowed.
    """
    if not isinstance(source, (str, Path)):
        raise RecipeError(f"recipe = {source!r}: give the path of a YAML file, or a name")
    path = Path(source)
    if path.suffix not in (".yaml", ".yml"):
        path = configs_dir() / f"{source}.yaml"
        if not path.is_file():
            raise RecipeError(_unknown("recipe", str(source), sorted(p.stem for p in configs_dir().glob("*.yaml"))))
    if not path.is_file():
        raise RecipeError(f"no recipe at {path}; recipes of this package: {', '.join(list_methods())}")
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(read, dict) or not isinstance(read.get("method"), str):
        raise RecipeError(f"{path} must be a mapping with the key `method`, one of {', '.join(list_methods())}")
    if other := [key for key in read if not isinstance(key, str)]:
        raise RecipeError(f"{path}: keys are names, not {other[0]!r}")
    name = read.pop("method")
    return _build(name, {**read, **overrides}, str(path) + _suffix(overrides))


def find_recipe(method: str | None, recipe: str | Path | Recipe | None, settings: dict[str, Any]) -> Recipe:
    """The recipe that `patch` was asked for: `recipe`, or the defaults of `method`, with `settings` on top."""
    if recipe is None:
        name = "turbo" if method is None else method
        return _build(name, settings, f"defaults of {name}" + _suffix(settings))
    if isinstance(recipe, Recipe):
        if settings:
            given = {k: getattr(recipe.settings, k) for k in recipe.settings.model_fields_set}
            recipe = _build(recipe.method, {**given, **settings}, recipe.origin + _suffix(settings))
        found = recipe
    else:
        found = load_recipe(recipe, **settings)
    if method is not None and method != found.method:
        raise RecipeError(
            f"method={method!r} clashes with {found.origin}, whose method is {found.method!r}; give one of them"
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
    return " with " + ", ".join(f"{k}={v!r}" for k, v in overrides.items()) if overrides else ""


def _unknown(kind: str, name: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(name, allowed, 1)
    return f"unknown {kind} {name!r}{f', did you mean {close[0]!r}?' if close else ';'} allowed: {', '.join(allowed)}"


def _build(name: str, settings: dict[str, Any], origin: str) -> Recipe:
    if not isinstance(name, str):
        raise RecipeError(f"{origin}: method = {name!r}; allowed: {', '.join(list_methods())}")
    if name not in list_methods():
        raise RecipeError(f"{origin}: {_unknown('method', name, list_methods())}")
    method = get_method(name)
    try:
        return Recipe(method(**settings), origin)
    except ValidationError as error:
        raise RecipeError(_explain(error, method, origin)) from None


def _explain(error: ValidationError, method: type[Method], origin: str) -> str:
    """All that is wrong in one message: key, value, what is allowed, and where it stands."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"][:1])
        if item["type"] == "extra_forbidden":
            lines.append(_unknown("key", key, sorted(method.model_fields)))
        elif key:
            hint = " (YAML reads 1e-4 as text; write 1.0e-4)" if item["type"] == "float_type" else ""
            lines.append(f"{key} = {item['input']!r}: {item['msg']}{hint}")
        else:
            lines.append(item["msg"].removeprefix("Value error, "))
    return f"{origin}: " + "; ".join(dict.fromkeys(lines))
