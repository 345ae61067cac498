"""Attention of models with both packed and unpacked layers."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from qattn_hf.attention import attention as packed
from qattn_hf.errors import UnsupportedError
from qattn_hf.layer.handle import Handle
from qattn_hf.model.layer_kinds import hides

NAMES = {"sdpa": "torch", "eager": "eager"}  # Transformers gives names with `sdpa` a special meaning


def attention(
    before: str, module: torch.nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention function of these models: packed if the layer returned a `Handle`, else the implementation before
    `patch`.

    Args:
        before: the model's implementation before `patch`, a key of `NAMES`.
        query: `[B, Hq, T, D]`.
        key, value: a `Handle`, or `[B, Hkv, S, D]` of an unpacked layer.
        attention_mask: result of this module's `mask` for the layer's type.

    Returns:
        `[B, T, Hq, Dv]`, and None or the attention weights.

    Raises:
        UnsupportedError: as in `attention.attention`.
    """
    if isinstance(key, Handle) or kwargs.get("cache") is not None or packed.is_span(attention_mask):
        return packed.attention(module, query, key, value, attention_mask, **kwargs)
    packed.refuse_mask(attention_mask)
    return function_of(before, module)(module, query, key, value, attention_mask, **kwargs)


def function_of(name: str, module: torch.nn.Module) -> Any:
    """Return the attention function of this name; `eager` is a function of the file that defines the module."""
    if name != "eager":
        return AttentionInterface()[name]
    function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise UnsupportedError(
            f"{type(module).__name__} has no eager attention; load it with attn_implementation='sdpa'"
        )
    return function


def mask(before: str, windows: bool, **kwargs: Any) -> torch.Tensor | None:
    """Mask function of these models, with the arguments of Transformers' mask functions.

    Args:
        windows: True if sliding windows are packed.

    Returns:
        for unpacked windows and chunks that hide tokens, the mask of the model's attention before `patch`; else the
        mask of packed layers (`attention.mask`).
    """
    local_size, config = kwargs.get("local_size"), kwargs.get("config")
    if hides(config, local_size) and not windows:
        # such models drop queries later, so the mask must be explicit
        if getattr(config, "num_kv_shared_layers", None):
            kwargs["allow_is_causal_skip"] = False
        return AttentionMaskInterface()[before](**kwargs)
    return packed.mask(windows=windows, **kwargs)


def check_implementation(before: str | None) -> str:
    """Return the implementation of a model's unpacked layers, if they may keep it.

    Raises:
        UnsupportedError: an implementation other than `sdpa` and `eager`.
    """
    if before not in NAMES:
        raise UnsupportedError(
            f"some layers stay unpacked, and {before} is not supported for them: load the model with "
            "attn_implementation='sdpa', or 'eager'"
        )
    return before


def register(before: str | None, windows: bool = False) -> str:
    """Register attention and mask functions that include the model's implementation. Return their name.

    Args:
        windows: True if sliding windows are packed and other layers are unpacked.

    Raises:
        UnsupportedError: an implementation other than `sdpa` and `eager`.
    """
    before = check_implementation(before)
    name = f"{packed.NAME}_{NAMES[before]}{packed.WITH_WINDOWS * windows}"
    AttentionInterface.register(name, functools.partial(attention, before))
    AttentionMaskInterface.register(name, functools.partial(mask, before, windows))
    return name
