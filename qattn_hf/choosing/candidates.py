"""Collect the settings of this package that a model may choose, with and without equalized keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from qattn_hf.attention.observe import packed_layers
from qattn_hf.cache.sizes import block_bits, geometry_of
from qattn_hf.errors import RecipeError, UnsupportedError
from qattn_hf.methods import measured_settings
from qattn_hf.model.device import device_of
from qattn_hf.model.heads import HeadSizes, head_sizes
from qattn_hf.model.layer_kinds import ModelLayerSpec
from qattn_hf.recipes.recipe import Recipe, find_recipe
from qattn_hf.recipes.recipe_files import list_recipes
from qattn_hf.recipes.spelling import split_method
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.support import unsupported

FULL_BITS = 16.0  # a setting with this many bits packs nothing
EQUALIZED = {"equalize_k": True}


class Candidate(NamedTuple):
    """A setting for a model: `specs` of all its layers, and `bits` per value in closed blocks."""

    setting: str
    recipe: Recipe
    specs: list[LayerSpec | ModelLayerSpec]
    bits: float


def candidates(model: PreTrainedModel, shared: dict[str, Any]) -> list[Candidate]:
    """Return all settings that a model may choose, recipes of the package first. Of equal settings the first is kept.

    Settings that no kernel computes for the model's heads are dropped, unless this drops all.

    Args:
        shared: settings that the recipe will also get, such as `memory`. Candidates without these settings are dropped.

    Raises:
        RecipeError: no setting takes `shared`.
        UnsupportedError: no setting fits the model, or the model's attention cannot be observed.
    """
    layers = packed_layers(model)
    found: dict[tuple[Any, ...], Candidate] = {}
    refused: Exception | None = None
    names = dict.fromkeys([*list_recipes(), *measured_settings("tune"), *measured_settings("released")])
    for setting, recipe in (one for name in names for one in _of(name, shared)):
        try:
            recipe = recipe.for_model(model.config)
            specs = recipe.layer_specs(model.config, device_of(model).type)
        except (RecipeError, UnsupportedError) as error:  # this setting does not fit the model; others may
            refused = error
            continue
        bits = _bits(model.config, specs, layers, model.dtype)
        if bits < FULL_BITS and recipe.settings.packs():
            found.setdefault(tuple(specs), Candidate(setting, recipe, specs, bits))
    if not found:
        raise refused or RecipeError(f"no setting takes {', '.join(shared)} without a method: name one as well")
    fast = [one for one in found.values() if _has_kernels(model.config, one.specs, layers)]
    return fast or list(found.values())


def _of(name: str, shared: dict[str, Any]) -> list[tuple[str, Recipe]]:
    """Return the setting with this name, and if it rotates keys, the same with equalized keys unless it sets them."""
    base = find_recipe(name, None, {})
    fields = set(type(base.settings).model_fields)
    if not shared.keys() <= fields or not base.settings.packs() or ("memory" in shared and not _takes_memory(base)):
        return []
    found = [(name, base)]
    if "equalize_k" in fields and not base.settings.model_dump()["equalize_k"]:
        try:
            spelled = f"{name}{',' if split_method(name)[1] else ':'}equalize_k=true"
            found.append((spelled, find_recipe(name, None, EQUALIZED)))
        except RecipeError:
            pass  # its keys are not rotated
    return found


def _takes_memory(recipe: Recipe) -> bool:
    """Return whether `memory` can lower the bits of all blocks of a recipe."""
    return "mixed" not in {getattr(recipe.settings, name, None) for name in ("bits", "k_bits", "v_bits")}


def _bits(
    config: PretrainedConfig, specs: list[LayerSpec | ModelLayerSpec], layers: list[int], dtype: torch.dtype
) -> float:
    """Return bits per value in closed blocks, mean over the packed layers, as a report counts them."""
    known: dict[tuple[Any, HeadSizes], float] = {}
    for i in layers:
        sizes, spec = head_sizes(config, i), specs[i]
        assert isinstance(spec, LayerSpec)
        if (spec, sizes) not in known:
            known[spec, sizes] = block_bits(spec, geometry_of(config, i, dtype), dtype)
    return sum(known[specs[i], head_sizes(config, i)] for i in layers) / len(layers)


def _has_kernels(config: PretrainedConfig, specs: list[LayerSpec | ModelLayerSpec], layers: list[int]) -> bool:
    for i in layers:
        sizes, spec = head_sizes(config, i), specs[i]
        if not isinstance(spec, LayerSpec) or unsupported(spec, sizes.kv, sizes.dim, sizes.v_dim) is not None:
            return False
    return True
