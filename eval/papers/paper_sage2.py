"""The method `paper_sage2`: SageAttention2 with settings only for comparisons with the paper, without kernels."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from qattn_hf.methods import register
from qattn_hf.methods.sage2 import Sage2
from qattn_kernels.formats import Format
from qattn_kernels.formats.fp8_channel.reference import Fp8ChannelFormat


@register
class PaperSage2(Sage2):
    """`sage2` with the number formats of Tables 5 and 6, and with the paper's scales of whole tensors and prompts."""

    moved: ClassVar = {}
    variants = ()

    granularity: Literal["token", "thread", "block", "tensor"] = Field(  # type: ignore[assignment]
        "thread", description="what shares a scale of queries and keys; tensor needs cache=model"
    )
    pv: Literal["e4m3", "e5m2", "int8", "model"] = Field(  # type: ignore[assignment]
        "e4m3", description="weights and values of a prefill"
    )
    v_scale: Literal["block", "prompt"] = Field(
        "block",
        description="FP8 values scaled by channel of a block, or (prompt) as in the paper, fixed by a row's first, "
        "others clamped",
    )

    @model_validator(mode="after")
    def _scales_fit(self) -> PaperSage2:
        if self.packs() and self.granularity == "tensor":
            raise ValueError(
                "granularity='tensor' clashes with cache='quantized', whose blocks are written one by one: "
                "take granularity='block', or cache='model'"
            )
        if self.smooth_v and self.pv == "int8":
            raise ValueError("smooth_v clashes with pv='int8': only FP8 values are smoothed")
        if self.v_scale == "prompt" and (self.pv == "model" or not self.packs()):
            raise ValueError(
                f"v_scale='prompt' clashes with pv={self.pv!r}, cache={self.cache!r}: take pv='e4m3', cache='quantized'"
            )
        return self

    def formats(self, layer: int, layers: int, heads: int) -> tuple[Format, Format]:
        k, v = super().formats(layer, layers, heads)
        return k, dataclasses.replace(v, v_scale=self.v_scale) if isinstance(v, Fp8ChannelFormat) else v
