"""Keep the offsets of positions after an image with the conversation, not on the model.

After an image, positions are smaller than column numbers. Qwen-VL models store the difference in a model attribute,
`rope_deltas`, and the next turn reads it. Another prompt between two turns, or a cache loaded from a file, would read a
wrong offset. So `after_call` saves the offset with the cache (`Conversation`), and `before_call` restores it before a
call or a `generate` that continues the cache.
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
from qattn_hf.model.device import compiling


def holders(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the modules around the decoder that store an offset."""
    decoder = decoder_of(model)
    found = [(name, module) for name, module in model.named_modules() if OFFSET in vars(module)]
    return tuple(name for name, module in found if any(part is decoder for part in module.modules()))


def before_call(module: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> None:
    """Pre-forward hook of a model with offsets: restore the offsets of the call's cache.

    For an empty cache the offsets are removed, and the model computes them from the tokens.
    """
    cache: Any = kwargs.get(CACHE)
    talk = getattr(cache, "conversation", None)
    if talk is None or compiling():
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
    """Forward hook of a model with offsets: save them on the call's cache."""
    cache: Any = kwargs.get(CACHE)
    talk = getattr(cache, "conversation", None)
    if talk is not None and not compiling():
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
    """Add the hooks and the override to a model with offsets, after the hooks that pass it a cache."""
    if not (names := holders(model)):
        return
    patched.holders = names
    patched.hook_ids.append(model.register_forward_pre_hook(before_call, with_kwargs=True).id)
    patched.hook_ids.append(model.register_forward_hook(after_call, with_kwargs=True).id)
    if hasattr(model, "_prepare_position_ids_for_generation"):
        model._prepare_position_ids_for_generation = BoundMethod(prepare_positions, model)


def uninstall(model: PreTrainedModel) -> None:
    """Remove the override. The hooks are removed by their ids."""
    model.__dict__.pop("_prepare_position_ids_for_generation", None)
