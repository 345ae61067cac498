"""INT-FlashAttention: attention in INT8 from keys to values (paper: INT-FlashAttention, Chen et al.)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from pydantic import Field

from qattn_hf.methods.base import SMOOTH_K, EqualizedMethod, Measured, Moved, Rotation, for_papers
from qattn_kernels.formats import Format
from qattn_kernels.formats.int4.reference import Int4Format
from qattn_kernels.formats.int8.reference import LEVELS, Int8Format
from qattn_kernels.formats.int8_block.reference import Int8BlockFormat
from qattn_kernels.formats.int8_ring.reference import Int8RingFormat
from qattn_kernels.formats.int_group.reference import IntGroupFormat
from qattn_kernels.formats.model.reference import ModelFormat
from qattn_kernels.formats.model_ring.reference import ModelRingFormat
from qattn_kernels.formats.smoothed.reference import SmoothedFormat
from qattn_kernels.layer.spec import Compute


class IntFlash(EqualizedMethod):
    """INT-FlashAttention: queries and keys INT8 by token, values and weights INT8, or unquantized (half)."""

    variants: ClassVar[tuple[dict[str, Any], ...]] = ({"mode": "half"}, {"bits": 4, "rotate": "hadamard"})
    measured = (
        Measured("int_flash", "quality compare bits decode prefill released"),
        Measured("int_flash:mode=half", "quality bits"),
        Measured("int_flash:bits=4", "quality bits"),
        Measured("int_flash:bits=4,rotate=hadamard", "quality tune"),
    )

    moved: ClassVar[dict[str, Moved]] = {"v_granularity": Moved("block", ("tensor",), for_papers("paper_int_flash"))}

    mode: Literal["full", "half"] = Field(
        "full", description="half quantizes queries and keys, but not values and weights"
    )
    rotate: Rotation = Field("none", description="rotation of queries and keys, which spreads outliers over channels")
    smooth_k: bool = Field(False, description=SMOOTH_K)
    bits: Literal[8, 4] = Field(
        8, description="bits of queries and keys; values and weights stay INT8, as do queries of a decode with smooth_k"
    )

    def formats(self, layer: int, layers: int, heads: int) -> tuple[Format, Format]:
        """Return the formats of K and V. If one side closes blocks, both have a ring of unquantized recent tokens."""
        if self.smooth_k:
            k = SmoothedFormat(inner=IntGroupFormat(bits=self.bits, granularity="token"))
            return k, ModelRingFormat() if self.mode == "half" else Int8BlockFormat()
        if self.mode == "half":
            return (Int8Format(), ModelFormat()) if self.bits == 8 else (Int4Format(), ModelRingFormat())
        return Int8RingFormat() if self.bits == 8 else Int4Format(), Int8BlockFormat()

    def arithmetic(self) -> Compute:
        """One scale for each query, INT8 weights with 127 levels, and row sums of the rounded weights (section 3.2)."""
        return dataclasses.replace(
            super().arithmetic(),
            q_scale="token",
            pv="int8" if self.mode == "full" else "model",
            qk_levels=2 ** (self.bits - 1) - 1,
            decode_levels=LEVELS if self.smooth_k else 2 ** (self.bits - 1) - 1,
            pv_levels=LEVELS,
            round_sum=True,
            rotate=self.rotate,
            smooth_k=self.smooth_k,
        )


METHOD = IntFlash
