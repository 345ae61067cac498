"""Offsets of positions after an image, which belong to a conversation and which models keep on themselves.

After an image, positions of tokens are nearer than their columns. Models of Qwen-VL's kind write that offset to an
attribute of their own, `rope_deltas`, from where the next turn reads it: another prompt between two turns, or a cache
from a file, would find the offset of somebody else. So the offset is noted on the cache after each call
(`Conversation`), and put back before a call or a `generate` that goes on with the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf.cache.conversation import OFFSET
from qattn_hf.generate.patched import Patched, patch_of
from qattn_hf.model._compat import CACHE
from qattn_hf.model.bound_method import BoundMethod
from qattn_hf.model.decoder import decoder_of


def holders(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of the modules around the decoder that keep an offset."""
    decoder = decoder_of(model)
    found = [(name, module) for name, module in model.named_modules() if OFFSET in vars(module)]
    return tuple(name for name, module in found if any(part is decoder for part in module.modules()))


def before_call(module: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> None:
    """Pre-forward hook of a model that keeps offsets: put those of the call's cache in place, or none for a fresh one,
    from whose tokens the model computes them."""
    cache: Any = kwargs.get(CACHE)
    talk = getattr(cache, "conversation", None)
    if talk is None or torch.compiler.is_compiling():
        return
    given, prepared, talk.prepared = kwargs.get("position_ids") is not None, talk.prepared, False
    if given and prepared:
        return
    if talk.offsets:
        talk.put_back(module, patch_of(module).holders)
    elif not given and kwargs.get("input_ids") is not None and not any(layer.edits for layer in cache.layers):
        for name in patch_of(module).holders:
            setattr(module.get_submodule(name), OFFSET, None)


def after_call(module: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Forward hook of a model that keeps offsets: note them on the call's cache."""
    cache: Any = kwargs.get(CACHE)
    talk = getattr(cache, "conversation", None)
    if talk is not None and not torch.compiler.is_compiling():
        rows = next((layer.batch for layer in cache.layers if layer.batch is not None), None)
        talk.note(module, patch_of(module).holders, rows)


def prepare_positions(model: PreTrainedModel, inputs: torch.Tensor, model_kwargs: dict[str, Any]) -> Any:
    """Override of `_prepare_position_ids_for_generation`, which reads and writes offsets before any call."""
    talk = getattr(model_kwargs.get(CACHE), "conversation", None)
    if talk is not None:
        talk.put_back(model, patch_of(model).holders)
        talk.prepared = True
    kind: Any = type(model)
    return kind._prepare_position_ids_for_generation(model, inputs, model_kwargs)


def install(model: PreTrainedModel, patched: Patched) -> None:
    """Put the hooks and the override on a model that keeps offsets, after those that pass it a cache."""
    if not (names := holders(model)):
        return
    patched.holders = names
    patched.hook_ids.append(model.register_forward_pre_hook(before_call, with_kwargs=True).id)
    patched.hook_ids.append(model.register_forward_hook(after_call, with_kwargs=True).id)
    if hasattr(model, "_prepare_position_ids_for_generation"):
        model._prepare_position_ids_for_generation = BoundMethod(prepare_positions, model)


def uninstall(model: PreTrainedModel) -> None:
    """Take the override off; hooks go by their ids."""
    model.__dict__.pop("_prepare_position_ids_for_generation", None)
