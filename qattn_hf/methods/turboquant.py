"""TurboQuant: rotated vectors, a norm and a codebook (paper: Attention-Gated Value Dequantization, Turney)."""

from __future__ import annotations

import dataclasses
from typing import Literal

from pydantic import Field

from qattn_hf.methods.base import Arithmetic, EqualizedMethod, Measured, Rotation
from qattn_kernels.formats import Format
from qattn_kernels.formats.model_ring.reference import ModelRingFormat
from qattn_kernels.formats.quant_block.reference import QuantBlockFormat
from qattn_kernels.formats.turboquant.reference import TurboQuantFormat
from qattn_kernels.layer.spec import Compute

FormatName = Literal["turbo2", "turbo3", "turbo4", "q4", "q8", "model"]


class TurboQuant(EqualizedMethod):
    """TurboQuant: rotated keys and values in 2- to 4-bit codebooks, or q8, q4 or unquantized, set for each side.

    As in the authors' released code, there is one stage. QJL, which quantizes the residual again, is left out.
    """

    variants = (
        {"k_format": "turbo3", "v_format": "q4", "norm_block": None},
        {"k_format": "turbo4", "v_format": "turbo2", "equalize_k": True},
    )
    measured = (
        Measured("turboquant", "quality compare bits decode prefill tune released"),
        Measured("turboquant:k_format=turbo4", "quality compare bits decode released"),
        Measured("turboquant:k_format=q4,v_format=q4", "quality"),
        Measured("turboquant:k_format=turbo3,v_format=turbo3", "quality bits decode released"),
        Measured("turboquant:k_format=turbo2,v_format=turbo2", "quality bits"),
        Measured("turboquant:k_format=turbo2,v_format=turbo2,norm_block=null", "tune"),
        Measured("turboquant:k_format=turbo3,v_format=turbo2,norm_block=null", "tune"),
        Measured("turboquant:k_format=turbo3,v_format=turbo3,norm_block=null", "bits tune"),
        Measured("turboquant:k_format=turbo4,v_format=turbo4,norm_block=null", "tune"),
    )

    k_format: FormatName = Field(
        "q8", description="format of K: turbo2 to turbo4, llama.cpp's q4 and q8, or unquantized"
    )
    v_format: FormatName = Field("turbo4", description="format of V, which needs fewer bits than K")
    norm_block: Literal[16, 32, 64, 128] | None = Field(
        32,
        description="channels that share a norm in turbo formats, at most those rotated together (32 if these are "
        "fewer); null: all these; 16: reference only",
    )
    rotate: Rotation = Field("hadamard", description="rotation of the sides in a turbo format; none for comparison")

    @classmethod
    def default_compute(cls) -> Arithmetic:
        return "model"

    def formats(self, layer: int, layers: int, heads: int) -> tuple[Format, Format]:
        return self._format(self.k_format, False), self._format(self.v_format, True)

    def _format(self, name: FormatName, for_values: bool) -> Format:
        """Return a format by its name. Each has a ring of unquantized recent tokens, so any two can be combined."""
        if name == "model":
            return ModelRingFormat()
        bits = int(name[-1])
        if name.startswith("q"):
            return QuantBlockFormat(bits=bits, for_values=for_values)
        # 0: all channels that are rotated together share a norm
        return TurboQuantFormat(bits=bits, for_values=for_values, norm_block=self.norm_block or 0)

    def arithmetic(self) -> Compute:
        """Apply the setting `rotate` to both sides. In `Compute`, `rotate` covers queries and keys."""
        k, v = (self.rotate if name.startswith("turbo") else "none" for name in (self.k_format, self.v_format))
        return dataclasses.replace(super().arithmetic(), rotate=k, rotate_v=v)


METHOD = TurboQuant
