"""Replacements of Transformers' methods that `generate` calls on a patched model: caches and masks.

All are module-level functions, so that a patched model can be copied and pickled.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.masking_utils import create_masks_for_generate

from qattn_hf.attention.attention import mask
from qattn_hf.attention.masks import check_earlier_mask, check_prompt_mask
from qattn_hf.cache.cache import QAttnCache
from qattn_hf.errors import UnsupportedError
from qattn_hf.generate.long_prompts import prefill_chunk
from qattn_hf.generate.patched import Patched, patch_of
from qattn_hf.generate.soft_prompts import check_soft_prompt, soft_prompt
from qattn_hf.generate.step_runner import run_steps, whole_model
from qattn_hf.generate.window import check_reach
from qattn_hf.model._compat import CACHE
from qattn_hf.model.layer_kinds import HybridLayerSpec, ModelLayerSpec
from qattn_hf.model.selection import restore
from qattn_kernels.layer.state import needs_constants

DRAFTED = 256  # spare capacity of a draft model's cache, in tokens


def check_cache(cache: Any, layers: int) -> None:
    """Check that a patched model with `layers` layers can use this cache.

    Raises:
        UnsupportedError: the cache is not a `QAttnCache`, or has another number of layers.
    """
    if not isinstance(cache, QAttnCache):
        raise UnsupportedError(
            f"a patched model needs its own cache, not a {type(cache).__name__}: pass QAttnCache.for_model(model), "
            f"or no {CACHE}, or unpatch(model)"
        )
    if len(cache.layers) != layers:
        raise UnsupportedError(
            f"the cache has {len(cache.layers)} layers and the model {layers}: pass QAttnCache.for_model(model)"
        )


def check_given(cache: QAttnCache) -> None:
    """Refuse an empty cache without the model's constants. It would silently skip equalization and error compensation
    of keys, and has no scales of a checkpoint.

    Raises:
        UnsupportedError: the cache was not made for a model, which defines the constants
            (`model_constants.constants`).
    """
    if any(needs_constants(layer.spec) and layer.constants is None for layer in cache.packed):
        raise UnsupportedError(
            "compensate_k, equalize_k, scales='checkpoint': this cache was made without a model: pass "
            "QAttnCache.for_model(model)"
        )


def prepare_cache(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generation_mode: GenerationMode,
    batch_size: int,
    max_cache_length: int,
    *args: Any,
) -> None:
    """Override of `_prepare_cache_for_generation`: pass a packed cache with the capacity that `generate` needs.

    Raises:
        UnsupportedError: another kind of cache is requested; the checkpoint sets `use_cache=False`; a prompt mask is
            not left padding, or hides tokens of the cache; drafts with a cache that holds tokens; more tokens than a
            sliding window shows.
    """
    _check_asked(model, generation_config, model_kwargs)
    generation_config.cache_implementation = None  # of this call only; a checkpoint's value is for stock caches
    drafted = _drafted(generation_config, generation_mode)
    if drafted:
        _check_rolls_back(model._qattn)
    if model._qattn.window is not None:
        check_reach(model._qattn.window, max_cache_length + drafted)
    mask, given = model_kwargs.get("attention_mask"), model_kwargs.get(CACHE)
    if mask is not None and mask.dim() == 2:
        check_prompt_mask(mask, generation_config, given if isinstance(given, QAttnCache) else None)
    if generation_config.use_cache is False:
        return  # each call makes its own cache and drops it
    last = model._qattn.last
    last.skip_next(False)
    cache = model_kwargs[CACHE] = _cache_of(model, given)
    if drafted:
        _check_empty(cache)
    last.skip_next(generation_config.guidance_scale not in (None, 1))  # guidance makes a second cache
    run_steps(model, generation_config, generation_mode, cache)
    if generation_config.prefill_chunk_size is None:  # of this call only
        generation_config.prefill_chunk_size = prefill_chunk(
            model, generation_config, model_kwargs, generation_mode, cache, max_cache_length
        )
    cache.prefill_chunk_size = generation_config.prefill_chunk_size
    if drafted:
        cache.raise_horizon(drafted)
        if model._qattn.runner.how == "compile" and generation_config.compile_config is None:
            generation_config.disable_compile = True  # Transformers 5.24 would compile a call for each draft length
    _allocate(model, cache, max_cache_length, drafted, generation_config.is_assistant)


def _allocate(model: PreTrainedModel, cache: QAttnCache, longest: int, drafted: int, assists: bool) -> None:
    """Give a cache room for `longest` tokens and `drafted` ones. `assists`: the model drafts for another."""
    if not assists:
        model._qattn.pool.allocate(cache.plan, longest + drafted)
    elif whole_model(model) and not all(layer.planned and layer.capacity >= longest for layer in cache.packed):
        # a draft model runs many short calls; spare capacity keeps addresses, so few of the calls capture again
        model._qattn.pool.allocate(cache.plan, longest + longest // 4 + DRAFTED)


def _check_empty(cache: QAttnCache) -> None:
    """Refuse drafts with a cache that holds tokens: Transformers would feed the whole prompt again."""
    if int(cache.get_seq_length()):
        raise UnsupportedError(
            "assisted generation reads the whole prompt again into a cache that holds tokens, so they would count "
            f"twice: leave {CACHE} out, or leave out the assistant and prompt_lookup_num_tokens"
        )


def _cache_of(model: PreTrainedModel, given: Any) -> QAttnCache:
    """Return the cache for a call of `generate`: a new one, or the caller's after its checks."""
    if given is None:
        return model._qattn.new_cache()
    check_cache(given, len(model._qattn.specs))
    check_earlier_mask(given, wait=True)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers  # early exit uses only the first layers
    given.check_whole(layers)
    given._is_user_defined = True
    model._qattn.last.record(given)
    return given


def _check_asked(model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Refuse another kind of cache, a learned prompt that does not work, and a checkpoint that sets `use_cache=False`.

    Without a cache, generation would be slow for no visible reason.
    """
    check_soft_prompt(model, model_kwargs.get("attention_mask"))
    implementation, default = generation_config.cache_implementation, model.generation_config.cache_implementation
    if implementation is not None and implementation != default:
        raise UnsupportedError(
            f"cache_implementation={implementation!r} asks for another cache than the patched model's: leave it out, "
            "or unpatch(model)"
        )
    if generation_config.use_cache is False and model.generation_config.use_cache is False:
        raise UnsupportedError(
            "this checkpoint's generation_config has use_cache=False, as is usual after training: pass use_cache=True "
            "to generate through the packed cache, or set model.generation_config.use_cache = None to call "
            "generate(use_cache=False)"
        )


def prepare_stock_cache(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generation_mode: GenerationMode,
    batch_size: int,
    max_cache_length: int,
    *args: Any,
) -> Any:
    """Override of `_prepare_cache_for_generation` over Transformers' own caches: refuse texts longer than the window.

    Raises:
        UnsupportedError: more tokens than the model's sliding window shows.
    """
    check_reach(model._qattn.window, max_cache_length + _drafted(generation_config, generation_mode))
    return type(model)._prepare_cache_for_generation(
        model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, *args
    )


def _drafted(generation_config: GenerationConfig, generation_mode: GenerationMode) -> int:
    """Return how many tokens drafts may add beyond the maximum length until verification removes them; 0 without
    drafts."""
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        return 0
    return 1 + max(generation_config.prompt_lookup_num_tokens or 0, generation_config.num_assistant_tokens or 0)


def candidate_generator(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Override of `_get_candidate_generator`: multi-token prediction layers (`use_mtp=True`) use the unpatched
    attention.

    Transformers builds these layers from the patched model's config, with a separate cache.
    """
    made = type(model)._get_candidate_generator(model, *args, **kwargs)
    if (drafting := getattr(made, "mtp_model", None)) is not None:
        restore([(drafting.config, patch_of(model).attention_before(model.config))])
    return made


def _check_rolls_back(patched: Patched) -> None:
    """Refuse drafts if the state of a layer cannot be rolled back to before them."""
    for spec in patched.specs:
        if isinstance(spec, (ModelLayerSpec, HybridLayerSpec)) and not spec.rolls_back:
            raise UnsupportedError(
                f"assisted generation rolls drafted tokens back, which layers of {spec} cannot: generate without an "
                "assistant and prompt_lookup_num_tokens"
            )


def generate_masks(
    kinds: tuple[str, ...],
    model: PreTrainedModel,
    *,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> Any:
    """Override of `create_masks_for_generate`: build the mask of a one-token step directly.

    Transformers' own function gives the same result and takes 0.2 ms of host time per token, while the device waits. A
    prompt learned by peft lengthens the user's 2-D mask, and peft needs that mask.

    Args:
        kinds: layer types that key the model's dict of masks; empty if the model takes a single mask.
        inputs_embeds: `[B, T, hidden]`.
        attention_mask: int64 `[B, S]`, cached tokens included, or None.
        kwargs: the cache as `CACHE`, and arguments that only Transformers' function reads.
    """
    if soft_prompt(model) is not None:
        return attention_mask
    cache = kwargs.get(CACHE)
    if inputs_embeds.shape[1] == 1 and isinstance(cache, QAttnCache):
        offset = cache.get_seq_length().to(inputs_embeds.device)
        step_mask = mask(inputs_embeds.shape[0], 1, 0, offset, attention_mask, inputs_embeds.device)
        return dict.fromkeys(kinds, step_mask) if kinds else step_mask
    return create_masks_for_generate(inputs_embeds=inputs_embeds, attention_mask=attention_mask, **kwargs)
