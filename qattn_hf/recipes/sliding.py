"""Decide which layers with a sliding window or attention in chunks are packed: the setting `sliding` of a recipe.

- `packed` packs all of them, or refuses the model.
- `model` leaves all of them to Transformers' stock cache.
- `auto` packs them if this takes at most `PAYS` of the bytes.
- `unquantized` keeps them in the packed cache in the model's dtype. It is lossless, and decode steps are captured.
- `lossless`, the default, is `unquantized` if this allows captured steps, else `model`.

A model has one mask for all its windows, so all windows get the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from qattn_hf.errors import UnsupportedError
from qattn_hf.layer.memory_budget import BudgetLayerSpec
from qattn_hf.messages import size
from qattn_hf.methods import Method
from qattn_hf.model.heads import head_sizes
from qattn_hf.model.layer_kinds import ModelLayerSpec, WindowLayerSpec, own_states
from qattn_kernels.layer.arena import Layout, places
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import Geometry
from qattn_kernels.step.states import ring_blocks

PAYS = 0.75  # share of the unpacked window's bytes; above it the saving is not worth the loss

Layers = list[ModelLayerSpec | WindowLayerSpec | None]


def decide(
    own: Sequence[ModelLayerSpec | None],
    config: PretrainedConfig,
    settings: Method,
    device_type: str,
    packed: Callable[[int], LayerSpec],
    unquantized: Callable[[int], LayerSpec],
) -> Layers:
    """Return what each layer keeps unpacked, a spec for each packed window, and None for other packed layers.

    Args:
        own: what each layer keeps if all windows are left to the model (`model_layers`).
        config: the model's config.
        settings: settings of the recipe, with its `sliding`.
        device_type: `cuda` or `cpu`, where the model will run.
        packed, unquantized: functions that return the spec of a layer, by its index, as if it had no window.

    Raises:
        UnsupportedError: the setting is `packed` and a layer cannot be packed. The message says why.
    """
    windows = {i: kept for i, kept in enumerate(own) if kept is not None and kept.window is not None}
    if not windows:
        return [*own]
    setting = settings.sliding
    plain = setting in ("lossless", "unquantized")
    specs: dict[int, WindowLayerSpec] = {}
    why = "sliding='model'" if setting == "model" else None
    if setting == "lossless" and (reason := _why_model(own, settings, device_type, packed, unquantized)):
        why = f"sliding='lossless': {reason}"
    if why is None:
        specs = {i: _window(kept, (unquantized if plain else packed)(i), plain) for i, kept in windows.items()}
        why = _why_not(specs, config, setting == "auto")
    if why and setting == "packed":
        raise UnsupportedError(f"sliding='packed' cannot pack these windows: {why}; use sliding='model'")
    unpacked = {i: replace(kept, why=why) for i, kept in windows.items()}
    return [(unpacked if why else specs).get(i, kept) for i, kept in enumerate(own)]


def _window(kept: ModelLayerSpec, spec: LayerSpec, unquantized: bool) -> WindowLayerSpec:
    """Return the spec of a packed window, for a layer that would keep the model's cache."""
    chunked = kept.kind == "chunked_attention"
    return WindowLayerSpec(**vars(spec), sliding_window=kept.window or 1, chunked=chunked, unquantized=unquantized)


def _why_model(
    own: Sequence[ModelLayerSpec | None],
    settings: Method,
    device_type: str,
    packed: Callable[[int], LayerSpec],
    unquantized: Callable[[int], LayerSpec],
) -> str | None:
    """Return why lossless windows are left to the model, because no step would be captured with them, or None."""
    if device_type != "cuda":
        return f"steps are eager on a {device_type}"
    if settings.decode == "eager":
        return "steps are eager with decode='eager'"
    chosen = [packed if kept is None else unquantized if kept.window is not None else None for kept in own]
    specs = [spec_of(i) for i, spec_of in enumerate(chosen) if spec_of is not None]
    if other := next((kept for kept in own_states([*own, *specs]) if getattr(kept, "window", None) is None), None):
        return f"steps are eager with {other}"
    if any(isinstance(spec, BudgetLayerSpec) for spec in specs):
        return "memory does not support packed windows"
    return None if all(spec.impl == "triton" for spec in specs) else "kernels do not compute all layers"


def _why_not(specs: dict[int, WindowLayerSpec], config: PretrainedConfig, by_bytes: bool) -> str | None:
    """Return why the windows should not be packed by these specs, or None. `by_bytes` requires a saving as well."""
    if any(spec.sink_pool.num for spec in specs.values()):
        return "the method keeps attention sinks, which a window drops"
    if not by_bytes:
        return None
    taken, stock = (sum(parts) for parts in zip(*(_bytes(i, spec, config) for i, spec in specs.items()), strict=True))
    if taken <= PAYS * stock:
        return None
    return f"packed they take {size(taken)} per row, unquantized {size(stock)}"


def _bytes(index: int, spec: WindowLayerSpec, config: PretrainedConfig) -> tuple[int, int]:
    """Return the bytes of one row of a full window: packed, and in the model's dtype."""
    heads, dtype = head_sizes(config, index), getattr(config.get_text_config(decoder=True), "dtype", None)
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    blocks = ring_blocks(spec.window, spec.sliding_window)
    packed = places(Layout(Geometry(1, heads.kv, heads.dim, heads.dim, blocks, dtype), spec))[1]
    return packed, spec.sliding_window * heads.kv * 2 * heads.dim * dtype.itemsize
