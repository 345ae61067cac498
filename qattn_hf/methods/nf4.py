"""NF4: 16 quantiles of the normal distribution, scaled by block of channels (papers: QLoRA, Dettmers et al.)."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pydantic import Field

from qattn_hf.methods.base import Arithmetic, EqualizedMethod, Measured, Rotation
from qattn_kernels.formats import Format
from qattn_kernels.formats.nf4.reference import Nf4Format
from qattn_kernels.layer.spec import Compute


class Nf4(EqualizedMethod):
    """NF4: 4-bit keys and values at the quantiles of a normal distribution, scaled by the largest of 64 channels.

    NF4 was made for weights, whose blocks are nearly normal. Keys and values become nearly normal when they are rotated
    (`rotate: hadamard`). On normal numbers NF4 errs less than INT4 with the same number of channels per scale.
    llama.cpp's q4 (`turboquant:k_format=q4,v_format=q4`) has 32 channels per scale and takes the same bits as
    `group_size: 32`. It errs no more than NF4: the scale of q4 takes the sign of the largest value and so uses all 16
    steps.
    """

    variants = ({"group_size": 32, "rotate": "hadamard", "equalize_k": True},)
    measured = (
        Measured("nf4", "quality compare bits decode prefill released"),
        Measured("nf4:group_size=32", "quality compare bits"),
        Measured("nf4:rotate=hadamard", "quality compare"),
    )

    group_size: Literal[32, 64, 128] = Field(64, description="channels of a token that share a scale")
    rotate: Rotation = Field("none", description="rotation of keys and values, which makes channels nearly normal")

    @classmethod
    def default_compute(cls) -> Arithmetic:
        return "model"

    def formats(self, layer: int, layers: int, heads: int) -> tuple[Format, Format]:
        return Nf4Format(group_size=self.group_size), Nf4Format(group_size=self.group_size, for_values=True)

    def arithmetic(self) -> Compute:
        return dataclasses.replace(super().arithmetic(), rotate=self.rotate, rotate_v=self.rotate)


METHOD = Nf4
