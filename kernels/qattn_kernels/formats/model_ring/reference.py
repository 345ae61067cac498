"""Model precision behind a ring: beside a format that closes blocks both sides of a layer have a ring."""

from __future__ import annotations

from dataclasses import dataclass

from qattn_kernels.formats.base import OpenFormat
from qattn_kernels.formats.model.reference import ModelFormat


@dataclass(frozen=True)
class ModelRingFormat(OpenFormat, ModelFormat):
    """Keys or values as the model made them, in the ring and in the arenas."""

    name = "model_ring"


FORMAT = ModelRingFormat
