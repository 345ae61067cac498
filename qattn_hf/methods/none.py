"""Unquantized keys and values in the packed cache."""

from __future__ import annotations

from qattn_hf.methods.base import Arithmetic, Measured, Method
from qattn_kernels.formats import Format
from qattn_kernels.formats.model.reference import ModelFormat


class Unpacked(Method):
    """No quantization, in the same cache and kernels: the control that isolates the effect of quantization."""

    measured = (Measured("none", "compare bits decode prefill released"),)

    @classmethod
    def default_compute(cls) -> Arithmetic:
        return "model"

    def formats(self, layer: int, layers: int, heads: int) -> tuple[Format, Format]:
        return ModelFormat(), ModelFormat()


METHOD = Unpacked
