"""Whether a method serves a model, from its config alone, and what its cache takes: what `qattn check` does.

    from qattn_hf import check

    found = check.check("Qwen/Qwen3-8B", "turbo")          # downloads a config, no weights
    found.refused, found.bytes_per_token, found.longest(80 * 2**30)

The model is built without memory for its weights, and asked what `patch` asks by the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from qattn_hf import _compat, attention, stock_cache
from qattn_hf.errors import QAttnError, UnsupportedError
from qattn_hf.fidelity.sizes import layer_bytes, values_of
from qattn_hf.patcher import attending
from qattn_hf.recipe import Recipe, find_recipe
from qattn_hf.supported_models import check_model
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.support import no_triton, unsupported
from qattn_kernels.layout import Geometry

__all__ = ["Check", "check", "without_weights"]

APART = 2**15  # tokens between two caches whose difference is what a token takes


@dataclass(frozen=True)
class Check:
    """What was found; sizes are of one row, with everything counted that a cache holds.

    Attributes:
        model_type: of the config.
        kinds: type of attention of each layer.
        origin: the recipe, as a report names it.
        refused: why `patch` refuses it, and what to do instead; None: it works, and what follows is known.
        weight_bytes: parameters in the config's precision, bf16 where it names none; quantized weights take less.
        dtype: that precision.
        layers: one row a layer: `layer`, `method`, `k_format`, `v_format`, `kernels` (`triton` or `reference`),
            `no_kernels` (why the reference, or None), `bytes`, `bytes_per_token`, `effective_bits`.
        at_tokens: the context for which `bytes` is counted.
        kv_bytes: of such a context.
        bytes_per_token: what each further token takes; `bytes_per_token_full_precision` in the model's own cache.
        effective_bits: of a value as the context grows; `effective_bits_total` of a value at `at_tokens`.
        positions: that the config says the model has, or None.
    """

    model_type: str
    kinds: list[str]
    origin: str
    refused: str | None = None
    weight_bytes: int = 0
    dtype: str = ""
    layers: list[dict[str, Any]] = field(default_factory=list)
    at_tokens: int = 0
    kv_bytes: int = 0
    bytes_per_token: float = 0.0
    bytes_per_token_full_precision: float = 0.0
    effective_bits: float | None = None
    effective_bits_total: float | None = None
    positions: int | None = None

    def longest(self, memory: int, full_precision: bool = False) -> int:
        """Tokens of one row whose cache fits beside the weights into `memory` bytes; activations are not counted."""
        free = memory - self.weight_bytes
        if full_precision:
            return max(0, int(free // self.bytes_per_token_full_precision))
        constant = self.kv_bytes - self.bytes_per_token * self.at_tokens
        return max(0, int((free - constant) // self.bytes_per_token))


def check(
    model: str | Path | PretrainedConfig,
    method: str | None = None,
    *,
    recipe: str | Path | Recipe | None = None,
    settings: dict[str, Any] | None = None,
    device_type: str = "cuda",
    at_tokens: int = 32768,
) -> Check:
    """What `patch(model, method, recipe=recipe, **settings)` would do.

    Args:
        model: folder or hub name, of which the config is read, or a config.
        device_type: where the model is going to run, `cuda` or `cpu`; it need not be here.
        at_tokens: the context for which bytes and `effective_bits_total` are counted.

    Raises:
        RecipeError: a recipe or setting that cannot be, for any model or for this one. OSError: no such config.
    """
    chosen = find_recipe(method, recipe, settings or {})
    config = model if isinstance(model, PretrainedConfig) else AutoConfig.from_pretrained(model)
    chosen = chosen.for_model(config)
    text = config.get_text_config(decoder=True)
    kinds = _compat.layer_types(text) if hasattr(text, "num_hidden_layers") else []
    about: dict[str, Any] = {"model_type": config.model_type, "kinds": kinds, "origin": chosen.origin}
    try:
        built = without_weights(config)
        check_model(built)
        specs = chosen.layer_specs(config, device_type)
        with attending(built, _registered(chosen, specs[0])):
            pass  # every layer took the attention that was selected
    except UnsupportedError as error:
        return Check(**about, refused=str(error))
    about |= {
        "weight_bytes": sum(p.nbytes for p in built.parameters()),
        "dtype": str(built.dtype).removeprefix("torch."),
        "positions": getattr(text, "max_position_embeddings", None),
    }
    return Check(**about, **_sizes(chosen, specs, text, built.dtype, device_type, at_tokens))


def without_weights(config: PretrainedConfig) -> PreTrainedModel:
    """A model of this config whose parameters have shapes and no memory.

    Raises:
        UnsupportedError: transformers has no class for it that generates.
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


def _registered(recipe: Recipe, spec: LayerSpec) -> str:
    """The name under which transformers knows the attention that `patch` would select."""
    return attention.register() if recipe.settings.packs() else stock_cache.register(spec)


def _sizes(
    recipe: Recipe, specs: list[LayerSpec], text: Any, dtype: torch.dtype, device_type: str, at_tokens: int
) -> dict[str, Any]:
    """The fields of `Check` that are counted."""
    if at_tokens < 1:
        raise QAttnError(f"at_tokens = {at_tokens}: a positive number of tokens")
    query = text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or query
    dim = getattr(text, "head_dim", None) or text.hidden_size // query
    geometry = Geometry(1, heads, dim, dim, 1, dtype)
    full, values = len(specs) * values_of(geometry, 1) * dtype.itemsize, values_of(geometry, 1)
    rows: list[dict[str, Any]] = []
    for i, spec in enumerate(specs if recipe.settings.packs() else ()):
        held, near, far = (layer_bytes(spec, geometry, n, dtype) for n in (at_tokens, APART, 2 * APART))
        reason = no_triton(device_type) or unsupported(spec, heads, query, dim, dim)
        rows.append({
            "layer": i,
            "method": recipe.settings_of(i).name(),
            "k_format": spec.k.label,
            "v_format": spec.v.label,
            "kernels": spec.impl,
            "no_kernels": reason if spec.impl == "reference" else None,
            "bytes": held,
            "bytes_per_token": (far - near) / APART,
            "effective_bits": 8 * (far - near) / APART / values,
        })  # fmt: skip
    if not rows:
        return {"at_tokens": at_tokens, "kv_bytes": full * at_tokens, "bytes_per_token": full,
                "bytes_per_token_full_precision": full}  # fmt: skip
    held, token = sum(row["bytes"] for row in rows), sum(row["bytes_per_token"] for row in rows)
    every = len(rows) * values
    return {
        "layers": rows,
        "at_tokens": at_tokens,
        "kv_bytes": held,
        "bytes_per_token": token,
        "bytes_per_token_full_precision": full,
        "effective_bits": 8 * token / every,
        "effective_bits_total": 8 * held / (every * at_tokens),
    }
