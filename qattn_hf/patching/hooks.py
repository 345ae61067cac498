"""Forward hooks and method overrides that `patch` installs on a model and its decoder, and `unpatch` removes.

All are module-level callables, so that a patched model can be copied and pickled.
"""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from qattn_hf.attention import attention
from qattn_hf.attention.masks import check_earlier_mask, check_mask, check_mask_later
from qattn_hf.cache.cache import QAttnCache
from qattn_hf.errors import UnsupportedError
from qattn_hf.generate import offsets
from qattn_hf.generate.continuous.cache import PagedCache
from qattn_hf.generate.continuous.manager import init_continuous_batching
from qattn_hf.generate.generation import (
    candidate_generator,
    check_cache,
    check_given,
    generate_masks,
    prepare_cache,
    prepare_stock_cache,
)
from qattn_hf.generate.patched import Patched, patch_of
from qattn_hf.generate.step_runner import compiled_call
from qattn_hf.generate.stop_check import defer_stop_checks
from qattn_hf.generate.window import check_call, check_compiled, check_reach
from qattn_hf.model import latent
from qattn_hf.model._compat import CACHE, by_cache_name, exporting
from qattn_hf.model.bound_method import BoundMethod
from qattn_hf.model.decoder import decoder_of
from qattn_hf.model.device import compiling, device_of
from qattn_hf.patching import direct_forward, training
from qattn_hf.recipes.recipe_files import RECIPE_FILE
from qattn_hf.saved.writer import check_writer


def before_forward(
    module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], names: tuple[str, ...]
) -> tuple | None:
    """Pre-forward hook of a patched model and of its decoder: pass a packed cache, refuse unsupported calls.

    Args:
        names: positional parameters of the module's forward. They turn `args` into keywords.

    Returns:
        No positional arguments, and the keywords with the cache and `use_cache` set. None for a call that attends as
        before `patch` (`training.why_unpacked`).

    Raises:
        UnsupportedError: attention weights as output, a cache of another kind or model, a mask with holes, packed
            sequences, tokens beyond a sliding window, an export, or training mode with a packed cache.
    """
    if exporting():
        _refuse_export()
    patched = patch_of(module)
    kwargs = by_cache_name({**dict(zip(names, args, strict=False)), **kwargs})
    if _trains(module, kwargs):
        return None
    _check_call(module, kwargs)
    if isinstance(kwargs.get("cache"), PagedCache):
        return (), {**kwargs, "attention_mask": UNREAD}
    use_cache = kwargs.get("use_cache")
    decoder: Any = module
    cache: Any = kwargs.get(CACHE)
    made = cache is None
    if made:
        _check_positions(kwargs)
        cache = kwargs[CACHE] = _new_cache(patched)
    check_cache(cache, len(patched.specs))
    # attention always reads through our cache; `after_forward` drops it from the output if it was not requested
    wanted = decoder.config.get_text_config(decoder=True).use_cache if use_cache is None else use_cache
    kwargs["use_cache"] = bool(wanted)
    if not compiling():
        _begin(decoder, cache, kwargs)
        patched.notices.of_call(cache, kwargs, _shape(kwargs)[1], made, use_cache)
    elif cache.allocated:
        check_compiled(patched.window, cache)
    else:
        _begin_compiled(decoder, cache, kwargs)
    return (), kwargs


# For continuous batching, which needs no mask: given a mask of four dimensions, Transformers builds none.
UNREAD = torch.empty(0, 0, 0, 0, device="cpu")

NOT_COMPILED = f"a compiled call cannot make its cache: pass {CACHE}=, a cache that an uncompiled call wrote to"


@torch.compiler.disable(reason=NOT_COMPILED)
def _new_cache(patched: Patched) -> QAttnCache:
    patched.notices.before_another()
    return patched.new_cache()


NOT_EXPORTED = "a patched model cannot be exported (torch.export, ExecuTorch, ONNX): call unpatch(model) before"


@torch.compiler.disable(reason=NOT_EXPORTED)
def _refuse_export() -> None:
    """Raise `UnsupportedError`. A strict export skips this, and its error names the reason given to `disable`."""
    raise UnsupportedError(NOT_EXPORTED)


@torch.compiler.disable(reason=NOT_COMPILED)
def _begin_compiled(module: Any, cache: QAttnCache, kwargs: dict[str, Any]) -> None:
    _begin(module, cache, kwargs, compiled=True)


def _begin(module: Any, cache: QAttnCache, kwargs: dict[str, Any], compiled: bool = False) -> None:
    """Check a call against its cache, and make room in the cache. Writes of a `compiled` call cannot be undone."""
    patched, (rows, tokens) = patch_of(module), _shape(kwargs)
    within = cache.within_call(module, tokens)
    if not within:
        check_earlier_mask(cache, wait=tokens > 1)
        check_writer(cache, module, tokens)
        cache.check_whole(module.config.get_text_config(decoder=True).num_hidden_layers)
    _check_new_mask(kwargs.get("attention_mask"), cache, tokens)
    if not within:
        patched.pool.allocate(cache.reserve, tokens)
    if rows and not cache.allocated:
        check_given(cache)
        patched.allocate(cache, rows, module.dtype, device_of(module))
    check_call(patched.window, cache, tokens)
    if not within and not compiled:
        cache.begin(module, tokens)
    cache.writer.note(module)


def after_forward(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook: mark the end of the call, and drop the cache from the output if `use_cache` is false.

    A stock model's output has no cache then. A call ended by an exception has no output, and its cache is restored.
    """
    cache: Any = kwargs.get(CACHE)
    if not isinstance(cache, QAttnCache):  # pages of continuous batching, or a call that trains
        return output
    if output is None:
        cache.take_back()
        return None
    if not compiling():
        cache.end(module)
    if kwargs["use_cache"]:
        return output
    if isinstance(output, tuple):
        return tuple(x for x in output if x is not cache)
    return type(output)(**{name: x for name, x in output.items() if x is not cache})


def _shape(kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the number of rows of a call, and the number of new tokens in each row."""
    for name in ("input_ids", "inputs_embeds"):
        if (inputs := kwargs.get(name)) is not None:
            return inputs.shape[0], inputs.shape[1]
    return 0, 0


def before_forward_stock(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], names: tuple[str, ...]) -> None:
    """Pre-forward hook over Transformers' stock caches (`cache="model"`): refuse unsupported calls, change nothing.

    Raises:
        UnsupportedError: attention weights as output, another device than at `patch`, tokens beyond a sliding window,
            an export without a cache, or training mode with a packed cache.
    """
    kwargs = by_cache_name({**dict(zip(names, args, strict=False)), **kwargs})
    if exporting() and kwargs.get(CACHE) is None:  # Transformers' masks are not causal then
        _refuse_export()
    if _trains(module, kwargs):
        return
    _check_call(module, kwargs)
    patched, device = patch_of(module), next(module.parameters()).device
    if patched.device_type != device.type and patched.device_type != (device := device_of(module)).type:
        raise UnsupportedError(
            f"the model was patched for {patched.device_type} and runs on {device.type}; patch it again"
        )
    if patched.window is not None and not compiling():
        cache = kwargs.get(CACHE)
        check_reach(patched.window, _shape(kwargs)[1] + (0 if cache is None else int(cache.get_seq_length())))


def _trains(module: Any, kwargs: dict[str, Any]) -> bool:
    """Select the attention of a call. Return whether it attends as before `patch`.

    Raises:
        UnsupportedError: as `training.why_unpacked`; or the user chose another attention after `patch`.
    """
    unpacked, patched = training.why_unpacked(module, kwargs), patch_of(module)
    if not compiling():
        _check_selected(module.config, patched)
        if unpacked is not None and not module.training:
            patched.notices.of_gradients()
    training.select_attention(module, unpacked)
    return unpacked is not None


def _check_call(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    if _requested(module, kwargs, "output_attentions"):
        raise UnsupportedError(
            "output_attentions is not supported: this attention never builds the weights; unpatch(model)"
        )


def _check_selected(config: PretrainedConfig, patched: Patched) -> None:
    """Refuse an attention that the user chose after `patch`. In a composite config, the text config names it."""
    own = config._attn_implementation or ""
    if patched.packs_now and own.startswith(attention.NAME):
        return
    selected = config.get_text_config(decoder=True)._attn_implementation or ""
    if not (selected.startswith(attention.NAME) if patched.packs_now else selected == patched.attention_before(config)):
        raise UnsupportedError(
            f"set_attn_implementation chose {selected!r} after patch, in place of the patched attention: patch the "
            "model again, or unpatch(model) first"
        )


def _check_new_mask(mask: Any, cache: QAttnCache, tokens: int) -> None:
    """Check a user's 2-D mask. A 4-D mask comes from our `generate`, or the attention function refuses it."""
    if not isinstance(mask, torch.Tensor) or mask.dim() == 4:
        return
    if mask.dim() != 2:
        raise UnsupportedError(f"a mask of {mask.dim()} dimensions is not supported; pass a 2-D attention_mask")
    if tokens > 1:
        check_mask(mask, cache, tokens)
    else:  # on a GPU a step of one token must not wait for the device
        check_mask_later(mask, cache, tokens)


def _requested(module: torch.nn.Module, kwargs: dict[str, Any], name: str) -> bool:
    value = kwargs.get(name)
    return bool(getattr(module.config, name, False) if value is None else value)


def _check_positions(kwargs: dict[str, Any]) -> None:
    """Refuse positions that restart inside a row: packed sequences, which Transformers detects only without a cache."""
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None or compiling():
        return
    if positions.dim() == 2 and bool((positions.diff(dim=-1) != 1).any()):
        raise UnsupportedError(
            "position_ids that restart mean packed sequences, which are not supported: one row a sequence"
        )


def save_pretrained(model: PreTrainedModel, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
    """Override of `save_pretrained`: save the stock model, and the recipe as `qattn.yaml` in the same folder.

    `patch(model)` uses this recipe if the model was loaded from the folder.

    Raises:
        UnsupportedError: `push_to_hub=True`, which would upload only Transformers' files.
    """
    if kwargs.get("push_to_hub"):
        raise UnsupportedError(
            f"save_pretrained(push_to_hub=True) does not upload {RECIPE_FILE}: call model.push_to_hub(repo_id)"
        )
    saved = type(model).save_pretrained(model, save_directory, *args, **kwargs)
    if args[0] if args else kwargs.get("is_main_process", True):
        text = patch_of(model).recipe.as_yaml()
        (Path(save_directory) / RECIPE_FILE).write_text(text, encoding="utf-8")
    return saved


def install(model: PreTrainedModel, patched: Patched) -> None:
    """Install hooks on the model and its decoder, and overrides of methods on the model instance."""
    packs = patched.recipe.settings.packs()
    for module in dict.fromkeys((model, decoder_of(model))):
        module._qattn = patched
        patched.marked += 1
        hook = functools.partial(before_forward if packs else before_forward_stock, names=_positional(module))
        patched.hook_ids.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True).id)
        if packs:
            ended = module.register_forward_hook(after_forward, with_kwargs=True, always_call=True)
            patched.hook_ids.append(ended.id)
            direct_forward.install(module)
    model.save_pretrained = BoundMethod(save_pretrained, model)
    model.init_continuous_batching = BoundMethod(init_continuous_batching, model)
    if not packs:
        if patched.window is not None:
            model._prepare_cache_for_generation = BoundMethod(prepare_stock_cache, model)
        return
    latent.install(model)
    offsets.install(model, patched)
    defer_stop_checks()
    model._prepare_cache_for_generation = BoundMethod(prepare_cache, model)
    model.get_compiled_call = BoundMethod(compiled_call, model)
    model._get_candidate_generator = BoundMethod(candidate_generator, model)
    # otherwise layers need several kinds of masks
    if patched.unpacked_attention is None and not hasattr(type(model), "create_masks_for_generate"):
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
        masks = functools.partial(generate_masks, tuple(dict.fromkeys(kinds)))
        model.create_masks_for_generate = BoundMethod(masks, model)


def _positional(module: torch.nn.Module) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in kinds)


def uninstall(model: PreTrainedModel) -> None:
    """Remove hooks and overrides made by `install`, and what Transformers compiled for the model."""
    patched: Patched = model._qattn
    for module in dict.fromkeys((model, decoder_of(model))):
        for hook_id in patched.hook_ids:
            for when in ("forward_pre_hooks", "forward_hooks"):
                getattr(module, f"_{when}").pop(hook_id, None)
                getattr(module, f"_{when}_with_kwargs").pop(hook_id, None)
            module._forward_hooks_always_called.pop(hook_id, None)
        direct_forward.uninstall(module)
        del module._qattn
    patched.hook_ids, patched.marked = [], 0
    latent.uninstall(model)
    offsets.uninstall(model)
    if isinstance(model.__dict__.get("_compiled_call_impl"), BoundMethod):
        del model._compiled_call_impl
    overrides = (
        "_prepare_cache_for_generation", "get_compiled_call", "create_masks_for_generate", "save_pretrained",
        "init_continuous_batching", "_get_candidate_generator",
    )  # fmt: skip
    for name in (*overrides, "_compiled_call", "_last_compile_config"):
        model.__dict__.pop(name, None)
