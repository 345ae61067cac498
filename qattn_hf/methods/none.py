"""Keys and values as the model made them, in the packed cache's own frame."""

from __future__ import annotations

from qattn_hf.methods.base import Arithmetic, Measured, Method
from qattn_kernels.formats import Format
from qattn_kernels.formats.model.reference import ModelFormat


class Unpacked(Method):
    """Model precision in the same cache and attention: the control beside every method, for judging the rest alone."""

    measured = (Measured("none", "compare bits decode prefill"),)

    @classmethod
    def default_compute(cls) -> Arithmetic:
        return "model"

    def formats(self, layer: int, layers: int, heads: int) -> tuple[Format, Format]:
        return ModelFormat(), ModelFormat()


METHOD = Unpacked
