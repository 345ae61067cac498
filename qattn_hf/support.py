"""Which models a packed cache can serve: what is refused at `patch`, with the reason and what to do instead."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel

from qattn_hf import _compat
from qattn_hf.errors import UnsupportedError
from qattn_hf.share import splits

OVERRIDES = ("_prepare_cache_for_generation", "get_compiled_call", "create_masks_for_generate")


def check_model(model: object) -> None:
    """Refuse models that a packed cache cannot serve; changes nothing.

    Raises:
        UnsupportedError: with the reason and what to do instead.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(
            f"patch takes a transformers model, not a {type(model).__name__}; patch the model inside it"
        )
    kind = model.config.model_type
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{kind} is an encoder-decoder, which is not supported; use a stock cache")
    if not type(model)._can_set_attn_implementation():
        raise UnsupportedError(
            f"{kind} does not use transformers' attention interface, so its keys and values cannot be reached; "
            "use a stock cache, or a model of the same family that does"
        )
    _check_layers(model.config.get_text_config(decoder=True), kind)
    _check_untouched(model)


def _check_layers(config: PretrainedConfig, kind: str) -> None:
    if not hasattr(config, "use_cache"):
        raise UnsupportedError(f"{kind} has no KV cache, so there is nothing to pack")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedError(f"{kind} keeps latent keys (MLA), which are not supported; use a stock cache")
    types = _compat.layer_types(config)
    other = sorted(set(types) - {"full_attention"})
    if other:
        where = [i for i, t in enumerate(types) if t != "full_attention"]
        advice = (
            "if your texts are shorter than the window, load it with config.sliding_window=None; else use a stock cache"
            if any("sliding" in t for t in other)
            else "use a stock cache"
        )
        raise UnsupportedError(
            f"{kind} has {', '.join(other)} in layers {where[:4]}..., which is not supported yet; {advice}"
        )
    if getattr(config, "is_causal", True) is False:
        raise UnsupportedError(f"{kind} is configured as bidirectional, which a cache cannot serve")


def _check_untouched(model: PreTrainedModel) -> None:
    """A model that somebody else patched may not do what we think it does."""
    ours = hasattr(model, "_qattn")
    found = [] if ours else [name for name in OVERRIDES if name in vars(model)]
    for name, module in model.named_modules():
        own = vars(module).get("forward")
        # accelerate's dispatch is no patch, nor is tensor parallelism
        if own is not None and not hasattr(module, "_hf_hook") and not splits(own):
            found.append(f"{name or type(module).__name__}.forward")
    if found:
        raise UnsupportedError(
            f"this model is already patched by other means ({', '.join(found[:3])}); undo that, or load the model anew"
        )


def check_selected(model: PreTrainedModel, selected: str) -> None:
    """After selecting our attention: every attention module of the decoder must read its name from its config."""
    for name, module in model.get_decoder().named_modules():
        config = getattr(module, "config", None)
        if "attention" not in type(module).__name__.lower() or config is None:
            continue
        if config._attn_implementation != selected:
            raise UnsupportedError(
                f"{type(module).__name__} at {name} does not follow the model's config; use a stock cache"
            )
