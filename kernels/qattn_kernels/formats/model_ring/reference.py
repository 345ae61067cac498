"""Model precision behind a ring: beside a store that closes blocks both sides of a layer have a ring."""

from __future__ import annotations

from dataclasses import dataclass

from qattn_kernels.formats.base import OpenStore
from qattn_kernels.formats.model.reference import ModelStore


@dataclass(frozen=True)
class ModelRingStore(OpenStore, ModelStore):
    """Keys or values as the model made them, in the ring and in the arenas."""

    name = "model_ring"


STORE = ModelRingStore
