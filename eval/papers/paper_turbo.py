"""The method `paper_turbo`: TurboAttention with settings only for comparisons with the paper, without kernels."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from qattn_hf.methods import register
from qattn_hf.methods.turbo import Turbo
from qattn_kernels.formats import Format
from qattn_kernels.formats.flashq.reference import FlashQFormat
from qattn_kernels.layer.spec import Compute


@register
class PaperTurbo(Turbo):
    """`turbo` with all rankings of Fig. 7b, and with the two scales as the paper has them."""

    moved: ClassVar = {}
    variants = ({"p_scale": "tile", "bits": "mixed", "priority": "random"},)

    priority: Literal["priority", "min_max", "variation", "entropy", "random"] = Field(  # type: ignore[assignment]
        "priority", description="what ranks the heads when a row's first block closes, lowest get 2 bits"
    )
    buffer_scale: Literal["token", "universal"] = Field(
        "token",
        description="a scale a token, or (universal) the paper's one of a row's first call, later values clamped",
    )
    p_scale: Literal["row", "tile"] = Field(
        "row", description="INT8 weights of a prefill scaled by row, or by tile as in the paper"
    )

    @model_validator(mode="after")
    def _scales_fit(self) -> PaperTurbo:
        if self.buffer_scale == "universal" and (self.smooth_k or self.v_scale == "token"):
            raise ValueError("buffer_scale='universal' is one scale: leave out smooth_k and v_scale='token'")
        return self

    def formats(self, layer: int, layers: int, heads: int) -> tuple[Format, Format]:
        sides = super().formats(layer, layers, heads)
        if self.buffer_scale == "token":
            return sides
        k, v = (dataclasses.replace(x, buffer_scale="universal") for x in sides if isinstance(x, FlashQFormat))
        return k, v

    def arithmetic(self) -> Compute:
        return dataclasses.replace(super().arithmetic(), p_scale=self.p_scale)
