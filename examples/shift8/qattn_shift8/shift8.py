"""INT8 with a power of two as the scale of a token."""

from __future__ import annotations

from qattn_hf.methods.base import Method
from qattn_kernels.formats import Format
from qattn_shift8.reference import Shift8Format


class Shift8(Method):
    """INT8 keys and values, scales that are powers of two and take one byte."""

    def formats(self, layer: int, layers: int, heads: int) -> tuple[Format, Format]:
        return Shift8Format(), Shift8Format()
