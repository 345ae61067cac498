"""Check a model against a recipe and compute the size of its cache, from a config. Users import it by `check.py`.

The model is built on the meta device, without memory for its weights. The functions that `patch` calls then check it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from qattn_hf.attention import attention
from qattn_hf.cache.sizes import layer_bytes, values_of
from qattn_hf.errors import QAttnError, UnsupportedError
from qattn_hf.layer.memory_budget import BudgetLayerSpec, held_tokens, unbounded
from qattn_hf.model import _compat
from qattn_hf.model.heads import HeadSizes, head_sizes
from qattn_hf.model.layer_kinds import ModelLayerSpec, grows, kind_of, window_of
from qattn_hf.model.positions import positions_of
from qattn_hf.model.selection import selecting
from qattn_hf.model.supported_models import check_full, check_model
from qattn_hf.planning.check_own import fill_states, own_row
from qattn_hf.recipes.recipe import Recipe, find_recipe
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.support import no_triton, unsupported
from qattn_kernels.layout import Geometry

__all__ = ["Check", "check", "without_weights"]

SPACING = 2**15  # tokens between two cache sizes; the difference in bytes gives the bytes of a token


@dataclass(frozen=True)
class Check:
    """Result of `check`. Sizes are bytes of one row (batch 1), every tensor of the cache counted.

    Attributes:
        model_type: `model_type` of the config.
        kinds: attention type of each layer, such as `full_attention`.
        origin: the recipe, as a report names it.
        refused: why `patch` refuses the model, and what to do instead. None: the model works, and the other fields are
            filled.
        weight_bytes: bytes of all parameters in `dtype`, or as the caller of `check` gave them. None for a quantized
            checkpoint, because its config does not say which parameters are quantized.
        quantization: `quant_method` of the config's `quantization_config` (`gptq`, `awq`, `bitsandbytes`, `fp8`, ...).
            None: the weights are not quantized.
        dtype: dtype of the model that the config names, else bf16.
        layers: one row for each layer: `layer`, `method`, `k_format`, `v_format`, `kernels` (`triton` or `reference`),
            `no_kernels` (why the reference computes, or None), `bytes`, `bytes_per_token`, `effective_bits`. An
            unpacked layer has `method` and `kernels` `model`, and `own`, what it keeps, in words. A packed layer with a
            sliding window or chunks has its `kind` and `window`, in tokens. Its `effective_bits` is None, because its
            size is bounded.
        at_tokens: context length, in tokens, for which `bytes` and `kv_bytes` are counted.
        kv_bytes: bytes of the cache at this context, without the layers in `uncounted`.
        own_bytes: bytes of the layers that do not grow, once their windows are full: unpacked layers and packed
            windows.
        uncounted: unpacked layers whose bytes a config does not tell. They do not grow.
        bytes_per_token: bytes that each further token adds.
        bytes_per_token_full_precision: bytes that each further token adds without packing.
        effective_bits: bits per value of the packed layers as the context grows.
        effective_bits_total: bits per value of all layers at `at_tokens`.
        positions: tokens that the model's positions reach, rope scaling counted. None if the config has no bound.
        held: tokens of one row for which the recipe's `memory` suffices, in 8 bits and in the fewest bits. The other
            figures are for the fewest bits. None without `memory`.
    """

    model_type: str
    kinds: list[str]
    origin: str
    refused: str | None = None
    weight_bytes: int | None = None
    quantization: str | None = None
    dtype: str = ""
    layers: list[dict[str, Any]] = field(default_factory=list)
    at_tokens: int = 0
    kv_bytes: int = 0
    own_bytes: int = 0
    uncounted: list[int] = field(default_factory=list)
    bytes_per_token: float = 0.0
    bytes_per_token_full_precision: float = 0.0
    effective_bits: float | None = None
    effective_bits_total: float | None = None
    positions: int | None = None
    held: tuple[int, int] | None = None

    def longest(self, memory: int, full_precision: bool = False) -> int:
        """Return the longest context of one row whose cache fits into `memory` bytes together with the weights.

        Activations are not counted. If no layer grows with the context, this is the model's number of positions if it
        fits.

        Args:
            memory: bytes of the GPU.
            full_precision: whether to count Transformers' stock cache instead of the packed one.

        Raises:
            QAttnError: the checkpoint is quantized, so the bytes of its weights are unknown.
        """
        if self.weight_bytes is None:
            raise QAttnError(
                f"the weights are quantized ({self.quantization}), and the config does not give their size: pass it, "
                "check(..., weight_bytes=N), or qattn doctor MODEL --weights 16GiB"
            )
        own_bytes = self.own_bytes
        if full_precision:
            own_bytes += sum(
                row["bytes_at_most_full_precision"] - row["bytes_at_most"] for row in self.layers if row.get("window")
            )
        free = memory - self.weight_bytes - own_bytes
        grows = self.bytes_per_token_full_precision if full_precision else self.bytes_per_token
        if not grows:  # only windows and states
            return (self.positions or 0) if free >= 0 else 0
        if full_precision:
            return max(0, int(free // grows))
        own = sum(row["bytes"] or 0 for row in self.layers if "bytes_at_most" in row)
        constant = self.kv_bytes - own - grows * self.at_tokens
        tokens = max(0, int((free - constant) // grows))
        return tokens if self.held is None else min(tokens, self.held[1])


def check(
    model: str | Path | PretrainedConfig,
    method: str | None = None,
    *,
    recipe: str | Path | Recipe | None = None,
    settings: dict[str, Any] | None = None,
    device_type: str = "cuda",
    at_tokens: int = 32768,
    weight_bytes: int | None = None,
) -> Check:
    """Predict from a config what `patch(model, method, recipe=recipe, **settings)` would do with the model.

    Args:
        model: folder or hub name whose config is read, or a config.
        method, recipe, settings: as in `patch`, settings as a dict.
        device_type: type of device that the model will run on, `cuda` or `cpu`. This machine need not have it.
        at_tokens: context length for which bytes and `effective_bits_total` are counted.
        weight_bytes: bytes of the weights. Default: counted from the config, except for quantized checkpoints.

    Returns:
        A `Check`. If `patch` would refuse the model, `Check.refused` says why and no error is raised.

    Raises:
        RecipeError: an unknown recipe, or a setting that is invalid for any model or for this one.
        OSError: the config is missing.
    """
    chosen = find_recipe(method, recipe, settings or {})
    config = model if isinstance(model, PretrainedConfig) else AutoConfig.from_pretrained(model)
    chosen = chosen.for_model(config)
    text = config.get_text_config(decoder=True)
    kinds = [layer.kind for layer in _compat.layer_types(text)] if hasattr(text, "num_hidden_layers") else []
    about: dict[str, Any] = {"model_type": config.model_type, "kinds": kinds, "origin": chosen.origin}
    try:
        built = without_weights(config)
        check_model(built)
        specs = chosen.layer_specs(config, device_type)
        if not chosen.settings.packs():
            check_full(built)
        with selecting(built, attention.register()):
            pass  # entering checks that every layer uses the selected attention
    except UnsupportedError as error:
        return Check(**about, refused=str(error))
    quantization = quantization_of(config)
    if weight_bytes is None and quantization is None:
        weight_bytes = sum(p.nbytes for p in built.parameters())
    about |= {
        "weight_bytes": weight_bytes,
        "quantization": quantization,
        "dtype": str(built.dtype).removeprefix("torch."),
        "positions": positions_of(config),
    }
    held = _held(specs, built)
    specs = [unbounded(spec) if isinstance(spec, LayerSpec) else spec for spec in specs]
    return Check(**about, held=held, **_sizes(chosen, specs, built, device_type, at_tokens))


def _held(specs: list[LayerSpec | ModelLayerSpec], built: PreTrainedModel) -> tuple[int, int] | None:
    """Return `Check.held` of the layer that holds the fewest tokens."""
    found = []
    for i, spec in enumerate(specs):
        if isinstance(spec, BudgetLayerSpec):
            heads = head_sizes(built.config.get_text_config(decoder=True), i)
            found.append(held_tokens(spec, Geometry(1, heads.kv, heads.dim, heads.v_dim, 1, built.dtype)))
    return min(found, default=None)


def without_weights(config: PretrainedConfig) -> PreTrainedModel:
    """Make a model of this config on the meta device. Its parameters have shapes and dtypes, but no memory.

    Raises:
        UnsupportedError: Transformers has no causal language model for this config.
    """
    kind = next(
        (getattr(transformers, name) for name in config.architectures or () if hasattr(transformers, name)), None
    )
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    with torch.device("meta"):
        if kind is not None:
            return kind._from_config(config, dtype=dtype)
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise UnsupportedError(f"transformers has no causal LM of the type {config.model_type}; use a stock cache")
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def quantization_of(config: PretrainedConfig) -> str | None:
    """Return how a checkpoint's weights are quantized, such as `gptq`, according to its config. None: not quantized."""
    for part in (config, config.get_text_config(decoder=True)):
        if settings := getattr(part, "quantization_config", None):
            settings = settings if isinstance(settings, dict) else settings.to_dict()
            name = settings.get("quant_method") or "bitsandbytes"  # early checkpoints of bitsandbytes have no name
            return str(getattr(name, "value", name))
    return None


def _sizes(
    recipe: Recipe, specs: list[LayerSpec | ModelLayerSpec], built: PreTrainedModel, device_type: str, at_tokens: int
) -> dict[str, Any]:
    """Compute the fields of `Check` that count bytes and bits."""
    if at_tokens < 1:
        raise QAttnError(f"at_tokens = {at_tokens}: a positive number of tokens")
    text, dtype = built.config.get_text_config(decoder=True), built.dtype
    sizes = [head_sizes(text, i) for i in range(len(specs))]
    token_values = sum(s.kv * (s.dim + s.v_dim) for s, spec in zip(sizes, specs, strict=True) if grows(spec))
    full = token_values * dtype.itemsize
    if not recipe.settings.packs():
        return {"at_tokens": at_tokens, "kv_bytes": full * at_tokens, "bytes_per_token": full,
                "bytes_per_token_full_precision": full}  # fmt: skip
    rows = []
    for i, spec in enumerate(specs):
        if isinstance(spec, LayerSpec):
            method = recipe.method_of(i, spec)
            rows.append(_packed_row(i, spec, sizes[i], method, dtype, device_type, at_tokens))
        else:
            rows.append({"layer": i, **own_row(spec, sizes[i], dtype, at_tokens)})
    fill_states(rows, built)
    return {"at_tokens": at_tokens, "bytes_per_token_full_precision": full, **_totals(rows, token_values, at_tokens)}


def _totals(rows: list[dict[str, Any]], token_values: int, at_tokens: int) -> dict[str, Any]:
    """Bytes and bits over all layers' rows; `token_values`: values that a token adds to the cache."""
    kv_bytes, token_bytes = (sum(row[key] or 0 for row in rows) for key in ("bytes", "bytes_per_token"))
    values = token_values * at_tokens + sum(row.get("values") or 0 for row in rows)
    return {
        "layers": rows,
        "kv_bytes": kv_bytes,
        "own_bytes": sum(row.get("bytes_at_most") or 0 for row in rows),
        "uncounted": [row["layer"] for row in rows if row["bytes"] is None],
        "bytes_per_token": token_bytes,
        "effective_bits": 8 * token_bytes / token_values if token_values else None,
        "effective_bits_total": 8 * kv_bytes / values if values else None,
    }


def _packed_row(
    index: int, spec: LayerSpec, heads: HeadSizes, method: str, dtype: torch.dtype, device_type: str, at_tokens: int
) -> dict[str, Any]:
    """Make a row of `Check.layers` for a packed layer."""
    geometry = Geometry(1, heads.kv, heads.dim, heads.v_dim, 1, dtype)
    at_length, near, far = (layer_bytes(spec, geometry, n, dtype) for n in (at_tokens, SPACING, 2 * SPACING))
    reason = no_triton(device_type) or unsupported(spec, heads.kv, heads.dim, heads.v_dim)
    window = window_of(spec)
    bits: dict[str, Any] = {
        "bytes_per_token": (far - near) / SPACING,
        "effective_bits": 8 * (far - near) / SPACING / values_of(geometry, 1),
    }
    if window is not None:  # a window is full after some tokens and then keeps its size
        bits = {
            "kind": kind_of(spec),
            "window": window,
            "bytes_at_most": layer_bytes(spec, geometry, 4 * window + SPACING, dtype),
            "bytes_at_most_full_precision": values_of(geometry, window) * dtype.itemsize,
            "values": values_of(geometry, min(at_tokens, window)),
            "bytes_per_token": 0.0,
            "effective_bits": None,
        }
    return {
        "layer": index,
        "method": method,
        "k_format": spec.k.label,
        "v_format": spec.v.label,
        "kernels": spec.impl,
        "no_kernels": reason if spec.impl == "reference" else None,
        "bytes": at_length,
        **bits,
    }
