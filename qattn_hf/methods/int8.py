"""INT8 keys and values with one scale per token, the method to try first."""

from __future__ import annotations

import dataclasses

from pydantic import Field, model_validator

from qattn_hf.methods.base import SCALES, SMOOTH_K, Measured, RotatedMethod, Scales
from qattn_kernels.formats import Format
from qattn_kernels.formats.int8.reference import LEVELS, Int8Format
from qattn_kernels.formats.int_group.reference import IntGroupFormat
from qattn_kernels.formats.smoothed.reference import SmoothedFormat
from qattn_kernels.layer.spec import Compute


class Int8(RotatedMethod):
    """INT8 keys and values with one scale per token: a small loss, half the memory of bf16, append only."""

    variants = ({"rotate_k": "hadamard", "rotate_v": "hadamard"},)
    measured = (
        Measured("int8", "quality compare bits tune decode prefill released", record="8bit"),
        Measured("int8_rotated", "compare bits decode prefill released"),
    )

    smooth_k: bool = Field(False, description=SMOOTH_K)
    scales: Scales = Field("token", description=SCALES)

    @model_validator(mode="after")
    def _scales_of_stored_numbers(self) -> Int8:
        changed = self.smooth_k or "hadamard" in (self.rotate_k, self.rotate_v)
        if self.scales == "checkpoint" and changed:
            raise ValueError("scales='checkpoint' fits neither rotated nor smoothed numbers: use scales='token'")
        return self

    def formats(self, layer: int, layers: int, heads: int) -> tuple[Format, Format]:
        """INT8 by token. With `smooth_k` both sides have a ring, because the first keys wait for their mean."""
        if not self.smooth_k:
            static = self.scales == "checkpoint"
            return Int8Format(static=static), Int8Format(transposed=True, static=static)
        keys, values = (IntGroupFormat(granularity="token", per_token=side) for side in (False, True))
        return SmoothedFormat(inner=keys), values

    def arithmetic(self) -> Compute:
        if not self.smooth_k:
            return super().arithmetic()
        return dataclasses.replace(
            super().arithmetic(), smooth_k=True, qk_levels=LEVELS, decode_levels=LEVELS, pv_levels=LEVELS
        )


METHOD = Int8
