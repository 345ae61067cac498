"""FP8 keys and values with one scale per token."""

from __future__ import annotations

from pydantic import Field, model_validator

from qattn_hf.methods.base import SCALES, Arithmetic, Measured, Method, Scales
from qattn_kernels.formats import Format
from qattn_kernels.formats.fp8.reference import Fp8Format


class Fp8(Method):
    """FP8 E4M3 keys and values with one scale per token: half the memory of bf16, append only."""

    measured = (Measured("fp8", "quality compare bits tune decode released", record="8bit"),)

    scales: Scales = Field("token", description=SCALES)

    @classmethod
    def default_compute(cls) -> Arithmetic:
        return "model"

    @model_validator(mode="after")
    def _no_integers(self) -> Fp8:
        for key in ("compute", "prefill_compute", "decode_compute"):
            if getattr(self, key) == "int8":
                raise ValueError(f"{key}='int8' clashes with method 'fp8', whose codes are no integers: take 'int8'")
        return self

    def formats(self, layer: int, layers: int, heads: int) -> tuple[Format, Format]:
        static = self.scales == "checkpoint"
        return Fp8Format(static=static), Fp8Format(transposed=True, static=static)


METHOD = Fp8
