"""How a patched model comes to its cache: in a plain forward, in `generate`, and in a compiled step.

All are module-level callables, so that a patched model can be copied and pickled.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode

from qattn_hf.attention import check_mask, register
from qattn_hf.cache import LastCache, QAttnCache
from qattn_hf.errors import UnsupportedError
from qattn_hf.recipe import Recipe
from qattn_kernels.spec import LayerSpec


@dataclass
class Patched:
    """What a patched model remembers: its recipe, its layers' specs, and how to undo the patch."""

    recipe: Recipe
    specs: list[LayerSpec]
    device_type: str
    attn_implementations: list[str | None]
    hook_ids: list[int] = field(default_factory=list)
    last: LastCache = field(default_factory=LastCache)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickle may come to a process where nothing was patched yet."""
        self.__dict__.update(state)
        register()

    def new_cache(self, max_cache_len: int | None = None) -> QAttnCache:
        """A fresh cache by this patch's recipe."""
        cache = QAttnCache(self.specs, self.recipe, max_cache_len, self.device_type)
        self.last.cache = cache
        return cache


def patch_of(module: torch.nn.Module) -> Patched:
    """What a patched module remembers."""
    patched: Any = module._qattn
    return patched


def before_forward(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], names: tuple[str, ...]) -> tuple:
    """Pre-forward hook of a patched model and of its decoder: give it our cache, refuse what cannot be served.

    `names` are the positional parameters of the module's forward.
    """
    patched = patch_of(module)
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    if module.training:
        raise UnsupportedError("a patched model does not train: call model.eval(), or unpatch(model) first")
    if _wanted(module, kwargs, "output_attentions"):
        raise UnsupportedError(
            "output_attentions is not supported: packed attention never builds the weights; unpatch(model)"
        )
    use_cache = kwargs.get("use_cache")
    config: Any = module.config
    if (config.get_text_config(decoder=True).use_cache if use_cache is None else use_cache) is False:
        raise UnsupportedError(
            "a patched model reads keys and values through its cache: use_cache=True, or unpatch(model)"
        )
    cache = kwargs.get("past_key_values")
    if cache is None:
        _check_positions(kwargs)
        cache = kwargs["past_key_values"] = patched.new_cache()
    _check_cache(cache, len(patched.specs))
    kwargs["use_cache"] = True
    if not torch.compiler.is_compiling():
        inputs = (kwargs.get(name) for name in ("input_ids", "inputs_embeds"))
        tokens = max((x.shape[1] for x in inputs if x is not None), default=0)
        _check_new_mask(kwargs.get("attention_mask"), cache, tokens)
        cache.reserve(tokens)
    return (), kwargs


def _check_new_mask(mask: Any, cache: QAttnCache, tokens: int) -> None:
    """Only a mask that the user made can be wrong; the 4-D one of `generate` is ours, or attention refuses it."""
    if not isinstance(mask, torch.Tensor) or mask.dim() == 4:
        return
    if mask.dim() != 2:
        raise UnsupportedError(f"a mask of {mask.dim()} dimensions is not supported; pass a 2-D attention_mask")
    if tokens > 1 or mask.device.type == "cpu":  # on a GPU a step of one token must not wait for the device
        check_mask(mask, cache.get_seq_length(), tokens)


def _wanted(module: torch.nn.Module, kwargs: dict[str, Any], name: str) -> bool:
    value = kwargs.get(name)
    return bool(getattr(module.config, name, False) if value is None else value)


def _check_cache(cache: Any, layers: int) -> None:
    if not isinstance(cache, QAttnCache):
        raise UnsupportedError(
            f"a patched model needs its own cache, not a {type(cache).__name__}: pass QAttnCache.for_model(model), "
            "or no past_key_values, or unpatch(model)"
        )
    if len(cache.layers) != layers:
        raise UnsupportedError(
            f"the cache has {len(cache.layers)} layers and the model {layers}: pass QAttnCache.for_model(model)"
        )


def _check_positions(kwargs: dict[str, Any]) -> None:
    """Positions that start anew inside a row mean packed sequences, which transformers detects without a cache only."""
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None or torch.compiler.is_compiling():
        return
    if positions.dim() == 2 and bool((positions.diff(dim=-1) != 1).any()):
        raise UnsupportedError(
            "position_ids that restart mean packed sequences, which are not supported: one row a sequence"
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
    """In place of `_prepare_cache_for_generation`: a cache of the capacity that `generate` will need."""
    if generation_config.cache_implementation is not None:
        raise UnsupportedError(
            f"cache_implementation={generation_config.cache_implementation!r} asks for another cache than the patched "
            "model's: leave it out, or unpatch(model)"
        )
    if generation_config.use_cache is False:
        raise UnsupportedError("a patched model generates through its cache: use_cache=True, or unpatch(model)")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        check_mask(mask, 0, mask.shape[1])
        if not bool(mask[:, -1].all()):
            raise UnsupportedError("generate needs padding on the left; this attention_mask has it on the right")
    cache = model_kwargs.get("past_key_values")
    if cache is None:
        cache = model_kwargs["past_key_values"] = model._qattn.new_cache()
    else:
        _check_cache(cache, len(model._qattn.specs))
        cache._is_user_defined = True
        model._qattn.last.cache = cache
    cache.decode = "eager"  # until transformers asks for the compiled call
    drafted = 0
    if generation_mode == GenerationMode.ASSISTED_GENERATION:  # drafts overshoot, and verification takes them back
        drafted = 1 + max(generation_config.prompt_lookup_num_tokens or 0, generation_config.num_assistant_tokens or 0)
        cache.raise_horizon(drafted)
    if not generation_config.is_assistant:  # an assistant's cache serves many short calls: it grows instead
        cache.plan(max_cache_length + drafted)


def compiled_call(model: PreTrainedModel, compile_config: CompileConfig | None) -> Callable:
    """In place of `get_compiled_call`: transformers' own if the recipe or the caller asks for it, else the eager call.

    Without this, `generate` on a GPU would compile by itself, since the capacity is fixed.
    """
    if compile_config is not None or model._qattn.recipe.settings.decode == "compile":
        if model._qattn.last.cache is not None:
            model._qattn.last.cache.decode = "compile"
        return type(model).get_compiled_call(model, compile_config)
    return model.__call__


def install(model: PreTrainedModel, patched: Patched) -> None:
    """Hooks on the model and its decoder, overrides on the instance."""
    for module in dict.fromkeys((model, model.get_decoder())):
        module._qattn = patched
        hook = functools.partial(before_forward, names=_positional(module))
        patched.hook_ids.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True).id)
    model._prepare_cache_for_generation = functools.partial(prepare_cache, model)
    model.get_compiled_call = functools.partial(compiled_call, model)


def _positional(module: torch.nn.Module) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in kinds)


def uninstall(model: PreTrainedModel) -> None:
    """The inverse of `install`."""
    patched: Patched = model._qattn
    for module in dict.fromkeys((model, model.get_decoder())):
        for hook_id in patched.hook_ids:
            module._forward_pre_hooks.pop(hook_id, None)
            module._forward_pre_hooks_with_kwargs.pop(hook_id, None)
        del module._qattn
    for name in ("_prepare_cache_for_generation", "get_compiled_call", "_compiled_call", "_last_compile_config"):
        model.__dict__.pop(name, None)
