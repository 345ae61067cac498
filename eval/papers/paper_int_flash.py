"""The method `paper_int_flash`: INT-FlashAttention with the paper's scale of values, without kernels."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from qattn_hf.methods import register
from qattn_hf.methods.int_flash import IntFlash
from qattn_kernels.formats import Format
from qattn_kernels.formats.int8_block.reference import Int8BlockFormat


@register
class PaperIntFlash(IntFlash):
    """`int_flash` with one scale for all values of a row."""

    moved: ClassVar = {}
    variants = ()

    v_granularity: Literal["block", "tensor"] = Field(
        "block",
        description="a scale a block of 64 values, or (tensor) the paper's one, fixed by a row's first block, others "
        "clamped",
    )

    @model_validator(mode="after")
    def _values_have_a_scale(self) -> PaperIntFlash:
        if self.mode == "half" and self.v_granularity == "tensor":
            raise ValueError("v_granularity='tensor' clashes with mode='half', whose values have no scale")
        return self

    def formats(self, layer: int, layers: int, heads: int) -> tuple[Format, Format]:
        k, v = super().formats(layer, layers, heads)
        return k, dataclasses.replace(v, granularity=self.v_granularity) if isinstance(v, Int8BlockFormat) else v
