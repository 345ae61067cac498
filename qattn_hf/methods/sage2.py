"""SageAttention2: smoothed INT8 or INT4 queries and keys, FP8 values (paper: SageAttention2, Zhang et al.)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from qattn_hf.methods.base import SMOOTH_K, Measured, Method
from qattn_kernels.formats import QUERY_BLOCK, Format
from qattn_kernels.formats.fp8_channel.reference import Fp8ChannelFormat
from qattn_kernels.formats.int8.reference import LEVELS
from qattn_kernels.formats.int_group.reference import IntGroupFormat
from qattn_kernels.formats.model.reference import ModelFormat
from qattn_kernels.formats.model_ring.reference import ModelRingFormat
from qattn_kernels.formats.smoothed.reference import SmoothedFormat
from qattn_kernels.layer.spec import Compute

Smoothing = Literal["none", "tensor", "block"]
PACKED_ONLY = ("v_scale", "sparse_v_tau", "sparse_v_budget", "crop_horizon", "decode")
SAGE1 = {"bits": 8, "granularity": "block", "smooth_q": "none", "smooth_v": False, "pv": "model"}


class Sage2(Method):
    """SageAttention2: INT8 or INT4 keys with their mean subtracted, FP8 values, and a prefill in INT8 and FP8.

    `cache: model` is the paper's plug-in: keys and values stay in transformers' own caches, and a call of more than 32
    tokens quantizes them for its products. Shorter calls use torch's attention in the model's precision, since
    quantizing without storing the codes would save a decode step nothing. `smooth_k` then subtracts the mean of all
    keys that the call attends to.

    The paper's Algorithm 1 always smooths queries; here 8-bit queries are not smoothed by default. `smooth_q: tensor`
    does as the paper, for one more product: of the mean query with every key.
    """

    variants: ClassVar[tuple[dict[str, Any], ...]] = (
        {"bits": 4, "granularity": "block", "smooth_q": "block", "smooth_v": True},
    )
    measured = (
        Measured("sage2", "quality compare bits decode prefill released"),
        Measured("sage2:bits=4", "quality compare bits tune decode prefill"),
        Measured("sage2:bits=4,smooth_q=none", "quality"),
        Measured("sage2:bits=4,smooth_k=false", "quality"),
        Measured("sage2:version=1", "quality"),
    )

    version: Literal[2, 1] = Field(
        2, description="1 is SageAttention: INT8 by block, weights and values in 16 bits; it sets the settings below"
    )
    bits: Literal[8, 4] = Field(8, description="of queries and keys; Hopper multiplies 4 bits as 8")
    granularity: Literal["token", "thread", "block", "tensor"] = Field(
        "thread", description="what shares a scale of queries and keys; thread is the paper's; tensor: reference only"
    )
    smooth_k: bool = Field(True, description=SMOOTH_K)
    smooth_q: Smoothing | None = Field(
        None,
        description="prefill subtracts the mean query; default tensor with 4 bits, none with 8 (tensor in the paper)",
    )
    smooth_v: bool = Field(False, description="prefill subtracts the mean value")
    pv: Literal["e4m3", "e5m2", "int8", "model"] = Field(
        "e4m3",
        description="weights and values of a prefill; model is 16 bits, for GPUs without FP8; e5m2 and int8: reference "
        "only",
    )
    v_scale: Literal["block", "prompt"] = Field(
        "block",
        description="FP8 values scaled by channel of a block, or (prompt: reference only) as in the paper, fixed by a "
        "row's first, others clamped",
    )

    cache: Literal["quantized", "model"] = Field(
        "quantized", description="model keeps transformers' own cache: only the attention of long calls is replaced"
    )

    @classmethod
    def covered(cls, key: str, value: Any) -> set[str]:
        """Settings that `key` sets too: `version=1` sets all of `SAGE1`."""
        return set(SAGE1) if key == "version" and value == 1 else super().covered(key, value)

    @model_validator(mode="after")
    def _fits(self) -> Sage2:
        if self.version == 1:
            for key in self.model_fields_set & SAGE1.keys():
                if getattr(self, key) != SAGE1[key]:
                    raise ValueError(f"{key}={getattr(self, key)!r} clashes with version=1, which has {SAGE1[key]!r}")
        if not self.packs():
            self._check_stock_cache()
        elif self._of("granularity") == "tensor":
            raise ValueError(
                "granularity='tensor' clashes with cache='quantized', whose blocks are written one by one: "
                "take granularity='block', or cache='model'"
            )
        if self._of("smooth_v") and self._of("pv") not in ("e4m3", "e5m2"):
            raise ValueError(f"smooth_v clashes with pv={self.pv!r}: only FP8 values are smoothed")
        if self._of("pv") == "model" and self.v_scale != "block":
            raise ValueError(f"v_scale={self.v_scale!r} clashes with pv='model', whose values have no scale")
        return self

    def _check_stock_cache(self) -> None:
        for key in PACKED_ONLY:
            value = getattr(self, key)
            if value != type(self).model_fields[key].default:
                raise ValueError(f"{key}={value!r} clashes with cache='model': it acts on a packed cache alone")
        for key in ("compute", "decode_compute"):
            if getattr(self, key) == "int8":
                raise ValueError(
                    f"{key}='int8' clashes with cache='model', whose decode is in the model's precision: "
                    "leave it out, or give prefill_compute"
                )

    def packs(self) -> bool:
        return self.cache == "quantized"

    def _of(self, key: str) -> Any:
        """Value of a setting; with `version=1` that of SageAttention."""
        return SAGE1[key] if self.version == 1 and key in SAGE1 else getattr(self, key)

    def formats(self, layer: int, layers: int, heads: int) -> tuple[Format, Format]:
        if not self.packs():
            return ModelFormat(), ModelFormat()
        k: Format = IntGroupFormat(bits=self._of("bits"), granularity=self._of("granularity"))
        k = SmoothedFormat(inner=k) if self.smooth_k else k
        return k, ModelRingFormat() if self._of("pv") == "model" else Fp8ChannelFormat(v_scale=self.v_scale)

    def arithmetic(self) -> Compute:
        bits, smooth_q = self._of("bits"), self._of("smooth_q")
        if smooth_q is None:
            smooth_q = "tensor" if bits == 4 else "none"
        base = super().arithmetic()
        return dataclasses.replace(
            base,
            decode=base.decode if self.packs() else "model",
            pv=self._of("pv"),
            block_q=QUERY_BLOCK,
            q_scale=self._of("granularity"),
            k_scale=self._of("granularity"),
            smooth_k=self.smooth_k,
            smooth_q=smooth_q,
            smooth_v=self._of("smooth_v"),
            qk_levels=2 ** (bits - 1) - 1,
            decode_levels=LEVELS,
            pv_levels=LEVELS,
        )


METHOD = Sage2
