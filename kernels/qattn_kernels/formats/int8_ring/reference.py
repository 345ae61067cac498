"""INT8 with one scale a token behind a ring: beside a format that closes blocks both sides of a layer have a ring."""

from __future__ import annotations

from dataclasses import dataclass

from qattn_kernels.formats.base import int8_ring
from qattn_kernels.formats.int8.reference import Int8Format
from qattn_kernels.layout import Geometry, TensorSpec


@dataclass(frozen=True)
class Int8RingFormat(Int8Format):
    """Tokens are final when they are written, into the ring; a full block moves into the arenas as it is; keys only."""

    name = "int8_ring"
    windowed = True

    def ring_tensors(self, geo: Geometry, slots: int, dim: int) -> dict[str, TensorSpec]:
        return int8_ring(geo, slots, dim)


FORMAT = Int8RingFormat
