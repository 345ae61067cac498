"""`patch` and `unpatch`: select packed attention on one model instance, and restore everything."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import PreTrainedModel

from qattn_hf.attention import model_constants
from qattn_hf.attention.stock_cache import STEPS
from qattn_hf.cache import notices
from qattn_hf.errors import QAttnError
from qattn_hf.generate.patched import Patched, Runner, patch_of
from qattn_hf.generate.step_runner import runner_of_model
from qattn_hf.generate.window import narrowest
from qattn_hf.model import _compat
from qattn_hf.model.decoder import decoder_of
from qattn_hf.model.device import device_of
from qattn_hf.model.heads import HeadSizes, head_sizes
from qattn_hf.model.layer_kinds import ModelLayerSpec, of_method, own_states
from qattn_hf.model.supported_models import check_full, check_model, check_parts
from qattn_hf.model.tensor_parallel import shard_of
from qattn_hf.patching import warm
from qattn_hf.patching.rollout import attach, detach
from qattn_hf.recipes.recipe import Recipe, find_recipe
from qattn_hf.recipes.recipe_settings import SHARED
from qattn_hf.saved.weights import weights_of
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import State

if TYPE_CHECKING:
    from qattn_kernels.step.warm import Calls

log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=PreTrainedModel)


def patch(
    model: Model, method: str | None = None, *, recipe: str | Path | Recipe | None = None, **settings: Any
) -> Model:
    """Patch a model in place: it then generates, scores and chats with a packed KV cache.

    With `sage2` and `cache="model"` it keeps Transformers' stock caches and replaces the attention of long calls. Only
    this instance changes. Its class and other models built from the same config stay unchanged. A second patch replaces
    the first. `unpatch` restores the model.

    Args:
        model: a decoder of Transformers, on the device where it will run. In training mode it attends as before the
            patch, and `generate` packs. With `compensate_k` or `equalize_k`, `patch` runs the model once over random
            tokens.
        method: a method's name (`list_methods()`) or a recipe's name, with or without settings: `turbo_sink`,
            `turbo:bits=2` (see `qattn_hf.recipes.spelling`).
        recipe: a YAML file, the name of a recipe of this package, a folder or a hub repository with `qattn.yaml`, or a
            `Recipe`. Without `method` and `recipe`, the model chooses within `bits` or `kl`. Otherwise `qattn.yaml` in
            the model's folder applies, as `save_pretrained` writes it, or else `turbo`.
        settings: settings of the method, named as the recipe's YAML keys. They override the recipe. `layers` has other
            settings for some layers (see `qattn_hf.recipes.recipe`). `family=False` skips the defaults of the model's
            family. Without `method` and `recipe`, `bits=3.5` asks for the least loss within 3.5 bits per value of
            closed blocks. `kl=0.01` asks for the fewest bits that lose no more: `qattn_hf.choosing.choose`.

    Returns:
        The same object.

    Raises:
        RecipeError: an unknown method, recipe or setting, or an invalid value.
        UnsupportedError: the model is not supported; the message says why. After either error it is unchanged.
    """
    check_model(model)
    _compat.warn_if_untested()
    chosen = _recipe(model, method, recipe, settings)
    patched = install(model, chosen)
    if chosen.settings.packs():
        _note_unused(model)
    _warn_of_nothing(patched.specs)
    return model


def install(model: PreTrainedModel, chosen: Recipe, calls: Calls | None = None) -> Patched:
    """Patch a supported model with a recipe for it, and start to compile kernels on a GPU.

    Args:
        calls: calls that need the kernels, as in `warm.begin`.
    """
    device_type = device_of(model).type
    specs = chosen.layer_specs(model.config, device_type, shard_of(model))
    own = own_states(specs)
    packs = chosen.settings.packs()
    if not packs:
        check_full(model)
    runner = runner_of_model(model, chosen.settings.decode, own) if packs else Runner("stock", STEPS)
    unpacked_attention, sizes = (_implementation(model), None) if own else (None, _sizes(model, specs))
    window = narrowest(model.config.get_text_config(decoder=True))
    patched = Patched(chosen, specs, unpacked_attention, device_type, [], runner, window=window, sizes=sizes)
    patched.constants = _unpatched_constants(model, specs)
    if model_constants.from_weights(specs):
        patched.weights = weights_of(decoder_of(model))
    attach(model, patched)
    _warn_of_slow_ways(model, patched)
    warm.begin_for(model, [chosen], calls)
    return patched


def _warn_of_slow_ways(model: PreTrainedModel, patched: Patched) -> None:
    """Warn on a GPU of layers without kernels, steps that cannot be captured, and another GPU's configurations."""
    notices.of_layers(model.config, patched.specs, patched.recipe.settings.impl, patched.device_type)
    if patched.device_type == "cuda" and patched.runner.how == "eager" and patched.runner.why is not None:
        patched.notices.of_eager(patched.runner.why)
    if (reason := notices.borrowed_configurations(patched.specs, patched.device_type)) is not None:
        patched.notices.of_configurations(reason)


def _warn_of_nothing(specs: list[LayerSpec | ModelLayerSpec]) -> None:
    """Warn if the method packs no layer."""
    if not any(map(of_method, specs)):
        packed = any(isinstance(spec, LayerSpec) for spec in specs)
        where = "is unquantized" if packed else "stays in transformers' own cache"
        warnings.warn(f"nothing is packed: every layer {where}, with {specs[0]}", stacklevel=3)


def _recipe(model: PreTrainedModel, method: str | None, recipe: Any, settings: dict[str, Any]) -> Recipe:
    """Return the recipe that the model chooses within a budget, or the named recipe with the family's defaults."""
    if method is None and recipe is None and has_budget(settings):
        return _chosen(model, settings)
    return find_recipe(method, recipe, settings, checkpoint=model.config.name_or_path).for_model(model.config)


def has_budget(settings: dict[str, Any]) -> bool:
    """Return whether settings without a method ask for a choice.

    Values that only turbo takes (`bits="mixed"`, `bits=2` with `n_h`) mean turbo."""
    bits = settings.get("bits")
    number = isinstance(bits, (int, float)) and not isinstance(bits, bool)
    return "kl" in settings or (number and (bits not in (2, 4) or settings.keys() <= {*SHARED, "bits"}))


def _chosen(model: PreTrainedModel, settings: dict[str, Any]) -> Recipe:
    """Return the recipe chosen within `bits` or `kl`. An earlier patch is set aside for the probe."""
    from qattn_hf.choosing.choose import check_budget, choose, warn_of_whole_bits  # this module patches models

    bits, kl, shared = check_budget(settings)
    warn_of_whole_bits(bits, stacklevel=5)
    earlier = _set_aside(model)
    try:
        return choose(model, bits, kl, shared)
    finally:
        _put_back(model, earlier)


def _unpatched_constants(model: PreTrainedModel, specs: list[LayerSpec | ModelLayerSpec]) -> list[State]:
    """Compute `constants` of a model. An earlier patch is removed first, and put back if this fails."""
    earlier = _set_aside(model)
    try:
        found = model_constants.constants(model, specs)
    except Exception:  # restore the model after any error, and raise it again
        _put_back(model, earlier)
        raise
    if earlier is not None:
        earlier.release()
    return found


def _set_aside(model: PreTrainedModel) -> Patched | None:
    """Remove an earlier patch but keep its caches, and return it for `_put_back`. None if there is none."""
    if not hasattr(model, "_qattn"):
        return None
    earlier = patch_of(model)
    detach(model)
    return earlier


def _put_back(model: PreTrainedModel, earlier: Patched | None) -> None:
    """Install a patch again that `_set_aside` returned."""
    if earlier is not None:
        attach(model, earlier)


def _note_unused(model: PreTrainedModel) -> None:
    """Log that the cache named in a model's generation_config is not used."""
    named = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if named is not None:
        log.warning("cache_implementation=%r in the model's generation_config is not used: the packed cache is", named)


def _sizes(model: PreTrainedModel, specs: list[LayerSpec | ModelLayerSpec]) -> list[HeadSizes] | None:
    """Return the heads of each layer of a model, or None.

    None means that the model is on several devices or split over processes, or that a layer is unpacked."""
    if shard_of(model).size > 1 or len({parameter.device for parameter in model.parameters()}) > 1:
        return None
    if not all(isinstance(spec, LayerSpec) for spec in specs):
        return None
    text = model.config.get_text_config(decoder=True)
    return [head_sizes(model.config, i) for i in range(text.num_hidden_layers)]


def unpatch(model: Model) -> Model:
    """Undo `patch`: the model computes bit for bit what it computed before.

    Its configs remain separate copies, which no other model shares.

    Args:
        model: a patched model.

    Returns:
        The same object.

    Raises:
        QAttnError: the model is not patched.
        UnsupportedError: the model is part of a larger model that was patched.
    """
    release(model)
    detach(model)
    return model


def release(model: PreTrainedModel) -> None:
    """Free the memory that a patched model keeps for its next call. The model stays patched.

    This frees its last cache (unless you hold a reference to it), memory of earlier caches, and captured decode steps.
    The next call allocates and captures again.

    Args:
        model: a patched model.

    Raises:
        QAttnError: the model is not patched.
        UnsupportedError: the model is part of a larger model that was patched.
    """
    if isinstance(model, PreTrainedModel):
        check_parts(model)
    if not hasattr(model, "_qattn"):
        raise QAttnError("this model is not patched")
    patch_of(model).release()


def _implementation(model: PreTrainedModel) -> str | None:
    """Return the attention implementation of the model's decoder, before any patch."""
    text = model.config.get_text_config(decoder=True)
    before = patch_of(model).attention_before(model.config) if hasattr(model, "_qattn") else None
    return text._attn_implementation if before is None else before
