"""Checks of a model before it is patched. Unsupported models are refused with the reason and an alternative."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from qattn_hf.errors import UnsupportedError
from qattn_hf.model import _compat, latent
from qattn_hf.model.bound_method import BoundMethod
from qattn_hf.model.decoder import decoder_of
from qattn_hf.model.device import only_moves
from qattn_hf.model.layer_kinds import WINDOWED, model_layers
from qattn_hf.model.tensor_parallel import splits

OVERRIDES = ("_prepare_cache_for_generation", "get_compiled_call", "create_masks_for_generate")


def check_parts(model: PreTrainedModel) -> None:
    """Refuse a model that contains a patched part, or that is part of a patched model.

    `patch` marks the model and its decoder. If fewer marked modules are found here, the others are in a larger model.

    Raises:
        UnsupportedError: the message names the model to use instead.
    """
    marked: dict[int, list[tuple[str, Any]]] = {}
    for name, module in model.named_modules():
        if "_qattn" in vars(module):
            marked.setdefault(id(module._qattn), []).append((name, module))
    for parts in marked.values():
        name, module = parts[0]
        kind = type(module).__name__
        if len(parts) < module._qattn.marked:
            raise UnsupportedError(
                f"{kind}{' at ' + name if name else ''} is part of a larger model that is patched: "
                "give patch, unpatch or release that model"
            )
        if name:
            raise UnsupportedError(f"its {kind} at {name} is patched by itself: unpatch(model.{name}) first")


def check_model(model: object) -> None:
    """Refuse models that a packed cache does not support. Changes nothing.

    Raises:
        UnsupportedError: the message has the reason and what to do instead.
    """
    if not isinstance(model, PreTrainedModel):
        inside = "patch(model.get_base_model())" if hasattr(model, "get_base_model") else "patch the model inside it"
        raise UnsupportedError(f"patch takes a transformers model, not a {type(model).__name__}: {inside}")
    check_parts(model)
    kind = model.config.model_type
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{kind} is an encoder-decoder, which is not supported; use a stock cache")
    if not type(model)._can_set_attn_implementation():
        raise UnsupportedError(
            f"{kind} does not use transformers' attention interface, so its keys and values cannot be reached; "
            "use a stock cache, or a model of the same family that does"
        )
    if own_cache := _cache_class(model):
        raise UnsupportedError(f"{kind} takes no cache but its own {own_cache}; use it as it is")
    text = model.config.get_text_config(decoder=True)
    _check_config(text, kind)
    _check_layers(text, kind)
    if any(getattr(layer, "kv_lora_rank", None) for layer in text.per_layer_config):
        latent.check_modules(model, kind)
    _check_causal(model, kind)
    _check_untouched(model)


def _cache_class(model: PreTrainedModel) -> str | None:
    """Return the name of a cache class defined in the model's file, as in MiniMax, or None."""
    defined = vars(sys.modules[type(model).__module__]).values()
    return next(
        (
            kind.__name__
            for kind in defined
            if isinstance(kind, type) and issubclass(kind, Cache) and kind.__module__ == type(model).__module__
        ),
        None,
    )


def _check_config(config: PretrainedConfig, kind: str) -> None:
    """Check that a text config has a cache, one stack of layers, and causal attention."""
    if not hasattr(config, "use_cache"):
        raise UnsupportedError(f"{kind} has no KV cache, so there is nothing to pack")
    if not hasattr(config, "num_hidden_layers"):
        raise UnsupportedError(f"{kind} has several stacks of layers, which are not supported; use a stock cache")
    if not hasattr(config.per_layer_config[0], "num_attention_heads"):
        raise UnsupportedError(f"{kind} has no attention, so there is nothing to pack; use it as it is")
    for encoder_key, decoder_key in (
        ("encoder_layers", "decoder_layers"),
        ("encoder_attention_heads", "decoder_attention_heads"),
    ):
        if getattr(config, encoder_key, None) != getattr(config, decoder_key, None):
            raise UnsupportedError(
                f"{kind}: the config has {encoder_key}={getattr(config, encoder_key, None)} where the decoder has "
                f"{getattr(config, decoder_key, None)}, which is not supported; use a stock cache"
            )
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedError(f"{kind} is configured as bidirectional, which a cache cannot serve; use it as it is")


def _check_layers(config: PretrainedConfig, kind: str) -> None:
    """Check the types of the layers of a text config, and that some layers have attention."""
    own = model_layers(config)
    if getattr(config, "cross_attention_layers", None):
        raise UnsupportedError(f"{kind} has layers of cross attention, which are not supported; use a stock cache")
    if all(spec is not None and spec.kind not in WINDOWED for spec in own):
        raise UnsupportedError(f"{kind} has no attention, so there is nothing to pack; use it as it is")


def check_full(model: PreTrainedModel) -> None:
    """Refuse a model with latents or with layers other than full attention, including layers that add an SSM.

    Raises:
        UnsupportedError: the message names the first layers that are not full attention.
    """
    latent.check_stock(model)
    text = model.config.get_text_config(decoder=True)
    kinds = [layer.kind for layer in _compat.layer_types(text)]
    full: list[bool] = []
    for own, kind in zip(model_layers(text), kinds, strict=True):
        reads = None if own is None else own.reads
        full.append(own is None and kind != "hybrid" if reads is None else full[reads])
    if where := [i for i, is_full in enumerate(full) if not is_full]:
        raise UnsupportedError(
            f"{model.config.model_type} has {kinds[where[0]]} in layers {where[:4]}..., which is not supported here: "
            "take a method that packs, or use a stock cache"
        )


def _check_causal(model: PreTrainedModel, kind: str) -> None:
    """Refuse layers with only bidirectional attention. Cross attention is accepted next to causal attention."""
    layers: dict[bool, set[int]] = {True: set(), False: set()}
    for module in decoder_of(model).modules():
        causal, layer = getattr(module, "is_causal", None), getattr(module, "layer_idx", None)
        if isinstance(causal, bool) and layer is not None:
            layers[causal].add(layer)
    where = sorted(layers[False] - layers[True])
    if where:
        trained = "load it with is_decoder=True if it was trained as a decoder, else "
        raise UnsupportedError(
            f"{kind} has attention that is not causal (is_causal=False) in layers {where[:4]}..., which a packed cache "
            f"cannot serve; {trained if getattr(model.config, 'is_decoder', None) is False else ''}use it as it is"
        )


def _replaced(module: nn.Module) -> bool:
    """Return whether the forward of a module instance is a patch.

    Dispatch and tensor parallelism are none, nor is the override of this package in a model that is patched again.
    """
    own = vars(module).get("forward")
    return not (own is None or isinstance(own, BoundMethod) or only_moves(module) or splits(own))


def _check_untouched(model: PreTrainedModel) -> None:
    """Refuse a model if other code patched its attention, or what calls it, on instances. It may compute other results.

    Fused norms, MLPs and linear maps on instances, as from Liger-Kernel and `use_kernels`, do not touch keys and are
    accepted. So is the forward of a model around the decoder, which Liger-Kernel replaces for its loss.
    """
    patched, decoder = hasattr(model, "_qattn"), decoder_of(model)
    overrides = [] if patched else [name for name in OVERRIDES if name in vars(model)]
    for name, module in model.named_modules():
        parts = list(module.modules()) if _replaced(module) else []
        around = module is not decoder and decoder in parts
        if not around and any(hasattr(part, "layer_idx") for part in parts):
            overrides.append(f"{name or type(module).__name__}.forward")
    if overrides:
        raise UnsupportedError(
            f"this model is already patched by other means ({', '.join(overrides[:3])}); undo that, or load it anew"
        )


def check_selected(model: PreTrainedModel, selected: str) -> None:
    """Check after an attention was selected that every attention module of the decoder reads it from its config.

    Raises:
        UnsupportedError: the message names the first module that ignores its config.
    """
    for name, module in decoder_of(model).named_modules():
        config = getattr(module, "config", None)
        if "attention" not in type(module).__name__.lower() or config is None:
            continue
        if config._attn_implementation != selected:
            raise UnsupportedError(
                f"{type(module).__name__} at {name} does not follow the model's config; use a stock cache"
            )
