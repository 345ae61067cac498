"""How a patched model comes to its cache: in a plain forward, in `generate`, and in a compiled step.

All are module-level callables, so that a patched model can be copied and pickled.
"""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.masking_utils import create_masks_for_generate

from qattn_hf import attention, stock_cache
from qattn_hf.attention import check_mask, check_prompt_mask, mask
from qattn_hf.cache import LastCache, QAttnCache
from qattn_hf.cuda_graph.capture import python_hook
from qattn_hf.cuda_graph.graph import GraphedCall
from qattn_hf.cuda_graph.pool import Pool
from qattn_hf.device import device_of
from qattn_hf.errors import QAttnError, UnsupportedError
from qattn_hf.recipe import Recipe, check_packs
from qattn_hf.recipe_files import BESIDE
from qattn_hf.window import check_call, check_compiled, check_reach
from qattn_kernels.layer.spec import LayerSpec


@dataclass
class Patched:
    """What a patched model remembers: its recipe, its layers' specs, and how to undo the patch.

    Attributes:
        decode, decode_reason: how `generate` runs its decode steps, and why not as a graph (`resolve_decode`).
        window: tokens that the model's narrowest sliding window shows, none of which hides a position (`window.py`).
        marked: how many modules were patched together, the model and its decoder.
        last, pool: memory that is kept between calls.
    """

    recipe: Recipe
    specs: list[LayerSpec]
    device_type: str
    attn_implementations: list[tuple[PretrainedConfig, str | None]]
    decode: str
    decode_reason: str | None
    window: int | None = None
    hook_ids: list[int] = field(default_factory=list)
    marked: int = 0
    last: LastCache = field(default_factory=LastCache)
    pool: Pool = field(default_factory=Pool)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickle may come to a process where nothing was patched yet."""
        self.__dict__.update(state)
        self.register()

    def register(self) -> str:
        """Make the attention known to transformers and return its name."""
        return attention.register() if self.recipe.settings.packs() else stock_cache.register(self.specs[0])

    def new_cache(self, max_cache_len: int | None = None) -> QAttnCache:
        """A fresh cache by this patch's recipe, the last one from here on."""
        check_packs(self.recipe)
        cache = QAttnCache(self.specs, self.recipe, max_cache_len, self.device_type, self.pool)
        self.last.record(cache)
        return cache

    def release(self) -> None:
        """Let go of all memory that is kept for later calls."""
        self.last.clear()
        self.pool.clear()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


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
    _check_call(module, kwargs)
    use_cache = kwargs.get("use_cache")
    config: Any = module.config
    cache = kwargs.get("past_key_values")
    if cache is None:
        _check_positions(kwargs)
        cache = kwargs["past_key_values"] = patched.new_cache()
    _check_cache(cache, len(patched.specs))
    # attention reads through our cache in any case; `after_forward` keeps it out of the output where none was wanted
    kwargs["use_cache"] = bool(config.get_text_config(decoder=True).use_cache if use_cache is None else use_cache)
    if torch.compiler.is_compiling():
        check_compiled(patched.window, cache)
    else:
        cache.check_whole(config.get_text_config(decoder=True).num_hidden_layers)
        tokens = _new_tokens(kwargs)
        _check_new_mask(kwargs.get("attention_mask"), cache, tokens)
        patched.pool.allocate(cache.reserve, tokens)
        check_call(patched.window, cache, tokens)
    return (), kwargs


def after_forward(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook: without `use_cache` the output has no cache; `kwargs` are those that `before_forward` made."""
    if kwargs["use_cache"]:
        return output
    cache = kwargs["past_key_values"]
    if isinstance(output, tuple):
        return tuple(x for x in output if x is not cache)
    return type(output)(**{name: x for name, x in output.items() if x is not cache})


def _new_tokens(kwargs: dict[str, Any]) -> int:
    inputs = (kwargs.get(name) for name in ("input_ids", "inputs_embeds"))
    return max((x.shape[1] for x in inputs if x is not None), default=0)


def before_forward_over(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], names: tuple[str, ...]) -> None:
    """The same of a model whose cache is transformers' own: refuse, and change nothing."""
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    _check_call(module, kwargs)
    patched, there = patch_of(module), next(module.parameters()).device
    if patched.device_type != there.type and patched.device_type != (there := device_of(module)).type:
        raise UnsupportedError(
            f"the model was patched for {patched.device_type} and runs on {there.type}; patch it again"
        )
    if patched.window is not None and not torch.compiler.is_compiling():
        cache = kwargs.get("past_key_values")
        check_reach(patched.window, _new_tokens(kwargs) + (0 if cache is None else int(cache.get_seq_length())))


def _check_call(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    if module.training:
        raise UnsupportedError("a patched model does not train: call model.eval(), or unpatch(model) first")
    if _wanted(module, kwargs, "output_attentions"):
        raise UnsupportedError(
            "output_attentions is not supported: this attention never builds the weights; unpatch(model)"
        )
    if not torch.compiler.is_compiling() and not (selected := _selected(module.config)).startswith(attention.NAME):
        raise UnsupportedError(
            f"set_attn_implementation chose {selected!r} after patch, in place of the patched attention: patch the "
            "model again, or unpatch(model) first"
        )


def _selected(config: PretrainedConfig) -> str:
    """The attention that the decoder takes; of a config that has others inside, that of its text."""
    own = config._attn_implementation or ""
    return own if own.startswith(attention.NAME) else config.get_text_config(decoder=True)._attn_implementation or ""


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
    asked, default = generation_config.cache_implementation, model.generation_config.cache_implementation
    if asked is not None and asked != default:
        raise UnsupportedError(
            f"cache_implementation={asked!r} asks for another cache than the patched model's: leave it out, or "
            "unpatch(model)"
        )
    generation_config.cache_implementation = None  # of this call: what the checkpoint has is for stock caches
    if generation_config.use_cache is False:
        raise UnsupportedError("a patched model generates through its cache: use_cache=True, or unpatch(model)")
    drafted = _drafted(generation_config, generation_mode)
    if model._qattn.window is not None:
        check_reach(model._qattn.window, max_cache_length + drafted)
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        check_prompt_mask(mask, generation_config)
    cache, last = model_kwargs.get("past_key_values"), model._qattn.last
    last.pass_over(False)
    if cache is None:
        cache = model_kwargs["past_key_values"] = model._qattn.new_cache()
    else:
        _check_cache(cache, len(model._qattn.specs))
        cache.check_whole()
        cache._is_user_defined = True
        last.record(cache)
    last.pass_over(generation_config.guidance_scale not in (None, 1))  # which has a cache of its own, made by a forward
    cache.ran("eager", _why_eager(model._qattn, generation_mode))
    if drafted:
        cache.raise_horizon(drafted)
    if not generation_config.is_assistant:  # an assistant's cache serves many short calls: it grows instead
        model._qattn.pool.allocate(cache.plan, max_cache_length + drafted)


def prepare_stock_cache(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generation_mode: GenerationMode,
    batch_size: int,
    max_cache_length: int,
    *args: Any,
) -> Any:
    """The same of a model whose cache is transformers' own, if it has a window."""
    check_reach(model._qattn.window, max_cache_length + _drafted(generation_config, generation_mode))
    asked = generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    return type(model)._prepare_cache_for_generation(model, *asked, *args)


def save_pretrained(model: PreTrainedModel, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
    """transformers' own, and beside the weights the recipe, which `patch(model)` of what is loaded there takes.

    Raises:
        UnsupportedError: with `push_to_hub=True`, which sends only what transformers itself wrote.
    """
    if kwargs.get("push_to_hub"):
        raise UnsupportedError(
            f"save_pretrained(push_to_hub=True) would leave {BESIDE} behind: call model.push_to_hub(repo_id)"
        )
    saved = type(model).save_pretrained(model, save_directory, *args, **kwargs)
    if args[0] if args else kwargs.get("is_main_process", True):
        text = patch_of(model).recipe.as_yaml()
        (Path(save_directory) / BESIDE).write_text(text, encoding="utf-8")
    return saved


def _drafted(generation_config: GenerationConfig, generation_mode: GenerationMode) -> int:
    """Tokens by which drafts may overshoot, before verification takes them back."""
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        return 0
    return 1 + max(generation_config.prompt_lookup_num_tokens or 0, generation_config.num_assistant_tokens or 0)


def _why_eager(patched: Patched, generation_mode: GenerationMode) -> str | None:
    """Why a `generate` runs eagerly that never asks for the compiled call."""
    if patched.decode == "eager":
        return patched.decode_reason
    if generation_mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        return f"{generation_mode.value.replace('_', ' ')} is not captured"
    return "transformers did not ask for a compiled call"


def compiled_call(model: PreTrainedModel, compile_config: CompileConfig | None) -> Callable:
    """In place of `get_compiled_call`: transformers' own if the recipe or the caller asks for it, else our own graphs.

    Without this, `generate` on a GPU would compile by itself, since the capacity is fixed.
    """
    patched = patch_of(model)
    cache, strict = patched.last.cache, patched.recipe.settings.decode == "graph"
    how, why = patched.decode, patched.decode_reason
    if compile_config is not None:
        how, why = "compile", None
    elif how == "graph" and not strict and (hook := python_hook(model)) is not None:
        how, why = "eager", f"a replay would leave out the forward hook {hook}; decode='graph' captures what it does"
    if cache is not None:  # a graph says so when it runs
        cache.ran(*("eager", "no two decode steps had the same kind of inputs") if how == "graph" else (how, why))
    if how == "compile":
        return type(model).get_compiled_call(model, compile_config)
    return GraphedCall(model, patched.pool, strict) if how == "graph" else model.__call__


def generate_masks(
    kinds: tuple[str, ...],
    *,
    inputs_embeds: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Any,
    **kwargs: Any,
) -> Any:
    """In place of `create_masks_for_generate`: a step of one token has its mask at once.

    transformers' own comes to the same by a way that costs 0.2 ms a token, all of which the device waits.

    Args:
        kinds: the layer types by which the model looks its mask up; empty if it takes the mask as it is.
    """
    if inputs_embeds.shape[1] == 1 and isinstance(past_key_values, QAttnCache):
        offset = past_key_values.get_seq_length().to(inputs_embeds.device)
        made = mask(inputs_embeds.shape[0], 1, 0, offset, attention_mask, inputs_embeds.device)
        return dict.fromkeys(kinds, made) if kinds else made
    cached = dict(inputs_embeds=inputs_embeds, attention_mask=attention_mask, past_key_values=past_key_values)
    return create_masks_for_generate(**cached, **kwargs)


class Method:
    """A function bound to one model, which it does not keep alive: a model that nobody uses any more is gone at once,
    and its memory with it. Copies and pickles of the model have their own."""

    def __init__(self, function: Callable, model: PreTrainedModel):
        self.function, self._model = function, weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (model := self._model()) is None:
            raise QAttnError(
                f"the model of this {self.function.__name__} is gone: keep it in a variable while you use it"
            )
        return self.function(model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Method:
        model: Any = self._model()
        return Method(self.function, memo.get(id(model), model))

    def __reduce__(self) -> Any:
        return Method, (self.function, self._model())


def install(model: PreTrainedModel, patched: Patched) -> None:
    """Hooks on the model and its decoder, overrides on the instance, of which a stock cache needs one at most."""
    packs = patched.recipe.settings.packs()
    for module in dict.fromkeys((model, model.get_decoder())):
        module._qattn = patched
        patched.marked += 1
        hook = functools.partial(before_forward if packs else before_forward_over, names=_positional(module))
        patched.hook_ids.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True).id)
        if packs:
            patched.hook_ids.append(module.register_forward_hook(after_forward, with_kwargs=True).id)
    model.save_pretrained = Method(save_pretrained, model)
    if not packs:
        if patched.window is not None:
            model._prepare_cache_for_generation = Method(prepare_stock_cache, model)
        return
    model._prepare_cache_for_generation = Method(prepare_cache, model)
    model.get_compiled_call = Method(compiled_call, model)
    if not hasattr(type(model), "create_masks_for_generate"):  # else the model has masks of its own kind
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
        model.create_masks_for_generate = functools.partial(generate_masks, tuple(dict.fromkeys(kinds)))


def _positional(module: torch.nn.Module) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in kinds)


def uninstall(model: PreTrainedModel) -> None:
    """The inverse of `install`."""
    patched: Patched = model._qattn
    for module in dict.fromkeys((model, model.get_decoder())):
        for hook_id in patched.hook_ids:
            for when in ("forward_pre_hooks", "forward_hooks"):
                getattr(module, f"_{when}").pop(hook_id, None)
                getattr(module, f"_{when}_with_kwargs").pop(hook_id, None)
        del module._qattn
    overrides = (
        "_prepare_cache_for_generation", "get_compiled_call", "create_masks_for_generate", "save_pretrained"
    )  # fmt: skip
    for name in (*overrides, "_compiled_call", "_last_compile_config"):
        model.__dict__.pop(name, None)
