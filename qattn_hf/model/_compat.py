"""All branches on the version of Transformers or torch. No other module branches on a version."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from transformers import PretrainedConfig, cache_utils
from transformers.cache_utils import LinearAttentionLayer, get_layer_types_and_kwargs
from transformers.generation import utils as generation_utils

TESTED = ("5.17", "5.24")
VERSION = Version(transformers.__version__).release[:2]
# name of the cache among the arguments and outputs of a model; versions 5.24 to 5.39 accept the old name as well
CACHE = "cache" if VERSION >= (5, 24) else "past_key_values"

# cache layer of a layer without keys and states; masks and lengths never come from it
NoStateLayer: type = getattr(cache_utils, "DummyLayer", LinearAttentionLayer)

# private to `generate`, so a later version may lack it
DeferredStopCheck: Any = getattr(generation_utils, "DeferredStopCheck", None)


def warn_if_untested() -> None:
    """Warn if the installed Transformers is outside the tested range (`TESTED`)."""
    low, high = (Version(v).release for v in TESTED)
    if not low <= VERSION <= high:
        warnings.warn(
            f"qattn_hf was tested with transformers {TESTED[0]} to {TESTED[1]}, not with {transformers.__version__}",
            stacklevel=3,
        )


def exporting() -> bool:
    """Return whether a `torch.export` is running.

    In torch 2.11 `torch.compiler.is_exporting` is true in any compiled call. The private flag is true only in an
    export.
    """
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def by_cache_name(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model's call with the cache named `CACHE`, whichever name the user gave it."""
    if CACHE == "past_key_values" or "past_key_values" not in kwargs:
        return kwargs
    old = kwargs.pop("past_key_values")
    return {CACHE: old, **kwargs}


# field of a layer's config that has its window, by the layer's type
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}


class LayerType(NamedTuple):
    """Type of a layer as Transformers' caches see it.

    Attributes:
        kind: `full_attention`, `sliding_attention`, `linear_attention`, ...; `dummy` for a layer without attention.
        window: tokens of a sliding window, or of a chunk. None for other types.
        states: number of convolution and recurrent states, 1 for types without states.
        reads: the earlier layer of its kind whose keys and values the layer reads. None if it computes them itself.
    """

    kind: str
    window: int | None = None
    states: int = 1
    reads: int | None = None


def layer_types(config: PretrainedConfig) -> list[LayerType]:
    """Return the type of each layer of a text config.

    Version 5.23 has a dict of settings for each layer, 5.17 has one dict for all. Version 5.23 lists KV-sharing layers
    and layers without attention as `dummy`. Version 5.17 omits KV-sharing layers, which are last, and has other names
    for layers without attention.
    """
    types, settings = get_layer_types_and_kwargs(config)
    types = [*types, *["dummy"] * (config.num_hidden_layers - len(types))]
    settings = settings if isinstance(settings, list) else [settings] * len(types)
    named = getattr(config, "layer_types", None) or types
    found: list[LayerType] = []
    writers: dict[str, int] = {}  # the last layer so far of each type that computes its keys and values
    for i, (layer, kind, own, name) in enumerate(zip(config.per_layer_config, types, settings, named, strict=True)):
        window = own.get("sliding_window") if name in WINDOWS else None
        if kind == "dummy" and name in WINDOWS:
            window = getattr(layer, WINDOWS[name])
        shares = kind == "dummy" and name not in ("moe", "mlp", "dummy")
        reads = writers.get(name) if shares else None  # an assistant's layers read layers of another model
        kind = "dummy" if kind in ("moe", "mlp") else kind if reads is None else name
        found.append(LayerType(kind, window, own.get("number_of_states", 1), reads))
        if not shares:
            writers[name] = i
    return found
