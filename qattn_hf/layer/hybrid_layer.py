"""A packed layer that also has linear attention or an SSM, whose states stay unpacked."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from qattn_hf.errors import UnsupportedError
from qattn_hf.layer import changes
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.layer.model_layer import HOST, STATE, attributes, new_layer, rows_of, state_tensors
from qattn_hf.layer.snapshot import Mark
from qattn_hf.layer.window_layer import packed_layer
from qattn_hf.model.layer_kinds import HybridLayerSpec, ModelLayerSpec
from qattn_kernels.layer.spec import LayerSpec


class HybridLayer(QAttnLayer, LinearAttentionAndFullAttentionLayer):
    """`QAttnLayer` with the convolution and recurrent states of `LinearAttentionLayer`."""

    is_compileable = False
    is_croppable = False

    def __init__(self, spec: HybridLayerSpec, max_cache_len: int | None = None, device_type: str | None = None):
        packed = LayerSpec(**{field.name: getattr(spec, field.name) for field in fields(LayerSpec)})
        super().__init__(packed, max_cache_len, device_type)
        LinearAttentionLayer.__init__(self, spec.states)

    def lazy_initialization(self, *keys_values: torch.Tensor, **states: Any) -> None:
        """Allocate the packed part for keys and values, or the one state that Transformers names."""
        if keys_values:
            QAttnLayer.lazy_initialization(self, *keys_values)
        else:
            LinearAttentionLayer.lazy_initialization(self, **states)

    def reset(self) -> None:
        self.torn = True
        LinearAttentionLayer.reset(self)
        QAttnLayer.reset(self)

    def outside_arena(self) -> dict[str, tuple[torch.Tensor, int | None]]:
        return state_tensors(self)

    def mark(self, bytes_too: bool) -> Mark:
        mark = super().mark(bytes_too)
        return mark._replace(host=mark.host | self.states())

    def counts(self) -> dict[str, Any]:
        return super().counts() | self.states()

    def states(self) -> dict[str, Any]:
        """Return the current attributes of the unpacked states."""
        return {name: value for name, value in attributes(self).items() if name in (*STATE, *HOST)}

    def with_rows(self, rows: torch.Tensor) -> Any:
        return super().with_rows(rows), rows_of(self, rows)

    def take(self, change: Any) -> None:
        """Apply a change of the packed part, or a result of `with_rows`."""
        if isinstance(change, changes.Change) or change is None:
            return super().take(change)
        self.check_ended()
        self.torn = True
        super().take(change[0])
        self.__dict__.update(change[1], torn=False)

    def check_crop(self, count: int) -> None:
        raise UnsupportedError(
            f"cannot crop {count} columns: a layer has linear attention or an SSM, and its earlier state is gone. "
            "Start from a fresh cache"
        )


def any_layer(
    spec: LayerSpec | ModelLayerSpec, max_cache_len: int | None = None, device_type: str | None = None
) -> Any:
    """Return an empty layer for a spec, packed or unpacked. Arguments as in `QAttnLayer`."""
    if isinstance(spec, ModelLayerSpec):
        return new_layer(spec)
    if isinstance(spec, HybridLayerSpec):
        return HybridLayer(spec, max_cache_len, device_type)
    return packed_layer(spec, max_cache_len, device_type)
