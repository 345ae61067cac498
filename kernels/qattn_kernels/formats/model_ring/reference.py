"""Unquantized keys or values with a ring, to pair with a format that packs whole blocks: both sides need a ring."""

from __future__ import annotations

from dataclasses import dataclass

from qattn_kernels.formats.base import OpenFormat
from qattn_kernels.formats.model.reference import ModelFormat


@dataclass(frozen=True)
class ModelRingFormat(OpenFormat, ModelFormat):
    """Keys or values in the model's dtype, in the ring and in the arenas."""

    name = "model_ring"
