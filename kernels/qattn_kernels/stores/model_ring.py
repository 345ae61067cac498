"""Model precision behind a ring: beside a store that closes blocks both sides of a layer have a ring."""

from __future__ import annotations

from dataclasses import dataclass

from qattn_kernels.layout import Geometry, TensorSpec
from qattn_kernels.stores.model import ModelStore


@dataclass(frozen=True)
class ModelRingStore(ModelStore):
    """Keys or values as the model made them, in the ring and in the arenas."""

    name = "model_ring"
    windowed = True

    def ring_tensors(self, geo: Geometry, slots: int, dim: int) -> dict[str, TensorSpec]:
        return {"ring": TensorSpec((geo.batch, geo.heads, slots, dim), geo.dtype)}


STORE = ModelRingStore
