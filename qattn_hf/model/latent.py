"""Multi-head latent attention (MLA, DeepSeek-V2, section 2.1): stored tensors, and absorbed products.

The cache holds one head for each token: the latent, in the format of values, and the RoPE part, in the format of keys.
Keys are both parts together and values are the latent, so nothing is stored twice.

Decode steps absorb the up-projections `W_UK` and `W_UV`, rows of `kv_b_proj`. Queries are multiplied with `W_UK` before
the attention, and the output with `W_UV` after it. Kernels expand prompts, where expanding takes less work
(`latent_layer`).

Modules of Transformers pass latents to their cache and expand them by `expand_kv`, which `patch` replaces on the
instance. Queries, RoPE and softmax scale stay in the module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf.errors import UnsupportedError
from qattn_hf.model.decoder import decoder_of
from qattn_hf.model.device import only_moves
from qattn_kernels.formats.traits import compensates
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.step.latent_prompt import UpProjections

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
OVERRIDE = "expand_kv"


def keep(latent: Any, rope: Any) -> tuple[Any, Any]:
    """Replace a module's `expand_kv`: pass the two halves of a `Handle` on to the attention function."""
    return latent, rope


def latent_modules(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """Yield the decoder's attention modules that keep latents, with their names."""
    for name, module in decoder_of(model).named_modules():
        if isinstance(getattr(module, "kv_lora_rank", None), int) and hasattr(module, "layer_idx"):
            yield name, module


def check_modules(model: PreTrainedModel, kind: str) -> None:
    """Refuse a model with latent attention whose up-projections cannot be used.

    Raises:
        UnsupportedError: the message names the first such module and what it lacks.
    """
    modules = list(latent_modules(model))
    if not modules:
        raise UnsupportedError(f"{kind} has latent attention (MLA) in modules of another kind; use a stock cache")
    if not hasattr(model, "_qattn") and (own := [name for name, m in modules if OVERRIDE in vars(m)]):
        raise UnsupportedError(f"other code replaced {OVERRIDE} of {own[0]}; undo that, or load the model anew")
    for name, module in modules:
        lacking = [size for size in SIZES if not isinstance(getattr(module, size, None), int)]
        lacking += [] if hasattr(type(module), OVERRIDE) else [OVERRIDE]
        if lacking:
            raise UnsupportedError(f"{kind}: {name} has latent attention (MLA) without {lacking[0]}; use a stock cache")
        if getattr(module, "indexer", None) is not None:
            raise UnsupportedError(f"{kind}: {name} has an indexer that chooses tokens (DSA); use a stock cache")
        up_projections(module)
    if getattr(model, "_tp_size", None) not in (None, 1):
        raise UnsupportedError(f"{kind} has latent attention (MLA), which is not split over processes; load it on one")


def check_stock(model: PreTrainedModel) -> None:
    """Refuse latent attention if an attention function reads keys and values from Transformers' stock caches.

    Raises:
        UnsupportedError: the message says what to do instead.
    """
    if any(True for _ in latent_modules(model)):
        raise UnsupportedError(
            f"{model.config.model_type} has latent attention (MLA), whose stock cache cannot be observed or computed "
            "with here: take a method that packs, or unpatch(model)"
        )


def layer_spec(spec: LayerSpec, method: str) -> LayerSpec:
    """Return the spec of a layer with latent attention, from the method's spec of an ordinary layer.

    Products are in floating point over dequantized tensors, because the two parts of a key have separate scales.

    Raises:
        ValueError: the method needs whole keys for its choices, or uses special products.
    """
    compute = spec.compute
    for given, what in (
        (spec.sink_pool.num, "a sink pool, which looks for small keys"),
        (spec.k.smoothed or spec.v.smoothed or compute.smooth_k or compute.smooth_q != "none", "smoothing"),
        (compensates(spec.k), "compensation between a key's channels"),
        ((compute.rotate, compute.rotate_v) != ("none", "none"), "a rotation of keys or values"),
        (compute.round_sum or compute.pv in ("e4m3", "e5m2"), "integer or FP8 products of whole keys and values"),
    ):
        if given:
            raise ValueError(
                f"{method} has {what}, and latent attention (MLA) stores parts of keys: take int8, turbo, kivi, fp8, "
                "nf4 or none without that setting"
            )
    return dataclasses.replace(
        spec, latent=True, compute=dataclasses.replace(compute, prefill="model", decode="model", pv="model")
    )


def _plain(linear: Any) -> bool:
    """Return whether a module is a linear layer that multiplies with its weight only.

    Quantizers may keep the class and replace `weight` by codes, or `forward` on the instance.
    """
    weight = getattr(linear, "weight", None)
    if type(linear) is not torch.nn.Linear or linear.bias is not None or type(weight) is not torch.nn.Parameter:
        return False
    untouched = "forward" not in vars(linear) or only_moves(linear)
    return weight.is_floating_point() and weight.dtype.itemsize > 1 and untouched


def up_projections(module: Any) -> UpProjections:
    """Return `W_UK` `[Hq, qk_nope_head_dim, kv_lora_rank]` and `W_UV` `[Hq, v_head_dim, kv_lora_rank]`.

    Both are views of the weight of `kv_b_proj`.

    Raises:
        UnsupportedError: `kv_b_proj` is not a plain linear layer: it is quantized, has an adapter, or has a bias.
    """
    linear: Any = getattr(module, "kv_b_proj", None)
    if not _plain(linear):
        raise UnsupportedError(
            f"kv_b_proj of {type(module).__name__} is not a plain linear layer, and latent attention (MLA) multiplies "
            "with its weight: leave it out of quantization and adapters (merge them), or use a stock cache"
        )
    rows = module.qk_nope_head_dim + module.v_head_dim
    both = linear.weight.view(-1, rows, module.kv_lora_rank)
    return UpProjections(both[:, : module.qk_nope_head_dim], both[:, module.qk_nope_head_dim :])


def install(model: PreTrainedModel) -> None:
    """Replace `expand_kv` on every latent module of a model."""
    for _, module in latent_modules(model):
        module.expand_kv = keep


def uninstall(model: PreTrainedModel) -> None:
    """Remove the overrides that `install` made."""
    for _, module in latent_modules(model):
        vars(module).pop(OVERRIDE, None)
