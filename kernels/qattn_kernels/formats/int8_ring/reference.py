"""INT8 with one scale per token and a ring, to pair with a format that packs whole blocks: both sides need a ring."""

from __future__ import annotations

from dataclasses import dataclass

from qattn_kernels.formats.base import int8_ring
from qattn_kernels.formats.int8.reference import Int8Format
from qattn_kernels.layout import Geometry, TensorSpec


@dataclass(frozen=True)
class Int8RingFormat(Int8Format):
    """INT8 tokens that are final in the ring. A full block moves to the arenas unchanged. Keys only."""

    name = "int8_ring"
    windowed = True

    def ring_tensors(self, geo: Geometry, slots: int, dim: int) -> dict[str, TensorSpec]:
        return int8_ring(geo, slots, dim)
