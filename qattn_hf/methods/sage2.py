"""SageAttention2: smoothed INT8 or INT4 queries and keys, FP8 values (paper: SageAttention2, Zhang et al.)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from qattn_hf.methods.base import SMOOTH_K, Measured, Method, Moved, for_papers
from qattn_kernels.formats import QUERY_BLOCK, Format
from qattn_kernels.formats.fp8_channel.reference import Fp8ChannelFormat
from qattn_kernels.formats.int8.reference import LEVELS
from qattn_kernels.formats.int_group.reference import IntGroupFormat
from qattn_kernels.formats.model.reference import ModelFormat
from qattn_kernels.formats.model_ring.reference import ModelRingFormat
from qattn_kernels.formats.smoothed.reference import SmoothedFormat
from qattn_kernels.layer.spec import Compute

Smoothing = Literal["none", "tensor", "block"]
PACKED_ONLY = ("sparse_v_tau", "sparse_v_budget", "crop_horizon", "decode")


class Sage2(Method):
    """SageAttention2: INT8 or INT4 keys with their mean subtracted, FP8 values, and a prefill in INT8 and FP8.

    `cache: model` is the paper's plug-in. Keys and values stay in Transformers' stock caches, and a call of more than
    32 tokens quantizes them for its products. Shorter calls use torch's attention in bf16 or fp16: a decode step gains
    nothing from quantizing values that are not stored. `smooth_k` then subtracts the mean of all keys that the call
    attends to.

    The paper's Algorithm 1 always smooths queries. Here 8-bit queries are not smoothed by default. `smooth_q: tensor`
    smooths them as in the paper, and costs one more product: of the mean query with every key.
    """

    variants: ClassVar[tuple[dict[str, Any], ...]] = (
        {"bits": 4, "granularity": "block", "smooth_q": "block", "smooth_v": True},
    )
    measured = (
        Measured("sage2", "quality compare bits decode prefill released"),
        Measured("sage2:bits=4", "quality compare bits tune decode prefill"),
        Measured("sage2:bits=4,smooth_q=none", "quality"),
        Measured("sage2:bits=4,smooth_k=false", "quality"),
        Measured("sage1", "quality", record="sage2"),
    )

    moved: ClassVar[dict[str, Moved]] = {
        "version": Moved(2, (1,), "the recipe sage1, which is SageAttention, the first"),
        "granularity": Moved("thread", ("tensor",), for_papers("paper_sage2")),
        "pv": Moved("e4m3", ("e5m2", "int8"), for_papers("paper_sage2")),
        "v_scale": Moved("block", ("prompt",), for_papers("paper_sage2")),
    }

    bits: Literal[8, 4] = Field(8, description="bits of queries and keys; Hopper multiplies 4 bits as 8")
    granularity: Literal["token", "thread", "block"] = Field(
        "thread", description="what shares a scale of queries and keys; thread is the paper's"
    )
    smooth_k: bool = Field(True, description=SMOOTH_K)
    smooth_q: Smoothing | None = Field(
        None,
        description="prefill subtracts the mean query; default tensor with 4 bits, none with 8 (tensor in the paper)",
    )
    smooth_v: bool = Field(False, description="prefill subtracts the mean value")
    pv: Literal["e4m3", "model"] = Field(
        "e4m3", description="weights and values of a prefill in FP8; model is 16 bits, for GPUs without FP8"
    )
    cache: Literal["quantized", "model"] = Field(
        "quantized", description="model keeps transformers' own cache: only the attention of long calls is replaced"
    )

    @model_validator(mode="after")
    def _fits(self) -> Sage2:
        if not self.packs():
            self._check_stock_cache()
        if self.smooth_v and self.pv == "model":
            raise ValueError(f"smooth_v clashes with pv={self.pv!r}: only FP8 values are smoothed")
        return self

    def _check_stock_cache(self) -> None:
        for key in PACKED_ONLY:
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:
                raise ValueError(f"{key}={value!r} clashes with cache='model': it needs a packed cache")
        for key in ("compute", "decode_compute"):
            if getattr(self, key) == "int8":
                raise ValueError(
                    f"{key}='int8' clashes with cache='model', which decodes unquantized: leave it out, or set "
                    "prefill_compute"
                )

    def packs(self) -> bool:
        return self.cache == "quantized"

    def formats(self, layer: int, layers: int, heads: int) -> tuple[Format, Format]:
        if not self.packs():
            return ModelFormat(), ModelFormat()
        k: Format = IntGroupFormat(bits=self.bits, granularity=self.granularity)
        k = SmoothedFormat(inner=k) if self.smooth_k else k
        return k, ModelRingFormat() if self.pv == "model" else Fp8ChannelFormat()

    def arithmetic(self) -> Compute:
        smooth_q = self.smooth_q or ("tensor" if self.bits == 4 else "none")
        base = super().arithmetic()
        return dataclasses.replace(
            base,
            decode=base.decode if self.packs() else "model",
            pv=self.pv,
            block_q=QUERY_BLOCK,
            q_scale=self.granularity,
            k_scale=self.granularity,
            smooth_k=self.smooth_k,
            smooth_q=smooth_q,
            smooth_v=self.smooth_v,
            qk_levels=2 ** (self.bits - 1) - 1,
            decode_levels=LEVELS,
            pv_levels=LEVELS,
        )


METHOD = Sage2
