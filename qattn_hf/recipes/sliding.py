"""Decide where layers with a sliding window or attention in chunks keep their tokens: the setting `sliding`.

- `exact`, the default, keeps the model's dtype. The windows are in the packed cache, unquantized, if that allows
  captured steps. Otherwise they stay in Transformers' stock cache, and the report says why.
- `packed` quantizes the windows as the method does, or refuses the model.

A model has one mask for all its windows, so all windows get the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from qattn_hf.errors import UnsupportedError
from qattn_hf.layer.memory_budget import BudgetLayerSpec
from qattn_hf.methods import Method
from qattn_hf.model.layer_kinds import ModelLayerSpec, WindowLayerSpec, own_states
from qattn_kernels.layer.spec import LayerSpec

Layers = list[ModelLayerSpec | WindowLayerSpec | None]


def decide(
    own: Sequence[ModelLayerSpec | None],
    settings: Method,
    device_type: str,
    packed: Callable[[int], LayerSpec],
    unquantized: Callable[[int], LayerSpec],
    paged: bool = False,
) -> Layers:
    """Return what each layer keeps unpacked, a spec for each window in the packed cache, and None for other layers.

    Args:
        own: what each layer keeps if all windows are left to the model (`model_layers`).
        settings: settings of the recipe, with its `sliding`.
        device_type: `cuda` or `cpu`, where the model will run.
        packed, unquantized: functions that return the spec of a layer, by its index, as if it had no window.
        paged: True for continuous batching, which has no stock cache: exact windows are packed, unquantized.

    Raises:
        UnsupportedError: the setting is `packed` and a layer cannot be packed. The message says why.
    """
    windows = {i: kept for i, kept in enumerate(own) if kept is not None and kept.window is not None}
    if not windows:
        return [*own]
    exact = settings.sliding == "exact"
    if exact and not paged and (why := why_stock(own, settings, device_type, packed, unquantized)):
        stock = {i: replace(kept, why=f"sliding='exact': {why}") for i, kept in windows.items()}
        return [stock.get(i, kept) for i, kept in enumerate(own)]
    specs = {i: _window(kept, (unquantized if exact else packed)(i), exact) for i, kept in windows.items()}
    if any(spec.sink_pool.num for spec in specs.values()):
        raise UnsupportedError(
            "sliding='packed' cannot pack these windows: the method keeps attention sinks, which a window drops. Use "
            "sliding='exact'"
        )
    return [specs.get(i, kept) for i, kept in enumerate(own)]


def _window(kept: ModelLayerSpec, spec: LayerSpec, unquantized: bool) -> WindowLayerSpec:
    """Return the spec of a window in the packed cache, for a layer that would keep the model's cache."""
    chunked = kept.kind == "chunked_attention"
    return WindowLayerSpec(**vars(spec), sliding_window=kept.window or 1, chunked=chunked, unquantized=unquantized)


def why_stock(
    own: Sequence[ModelLayerSpec | None],
    settings: Method,
    device_type: str,
    packed: Callable[[int], LayerSpec],
    unquantized: Callable[[int], LayerSpec],
) -> str | None:
    """Return why exact windows stay in the stock cache, or None. The packed cache pays if it allows captured steps."""
    if device_type != "cuda":
        return f"steps are eager on a {device_type}"
    if settings.decode == "eager":
        return "steps are eager with decode='eager'"
    chosen = [packed if layer is None else unquantized if layer.window is not None else None for layer in own]
    specs = [spec_of(i) for i, spec_of in enumerate(chosen) if spec_of is not None]
    if other := next((spec for spec in own_states([*own, *specs]) if getattr(spec, "window", None) is None), None):
        return f"steps are eager with {other}"
    if any(isinstance(spec, BudgetLayerSpec) for spec in specs):
        return "memory does not support packed windows"
    return None if all(spec.impl == "triton" for spec in specs) else "kernels do not compute all layers"
