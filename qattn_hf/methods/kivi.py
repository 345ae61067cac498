"""KIVI: keys quantized by channel, values by token, the newest tokens unquantized (paper: KIVI, Liu et al.)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from qattn_hf.methods.base import CLIP, Arithmetic, Measured, WindowedMethod
from qattn_kernels.formats import Format
from qattn_kernels.formats.kivi.reference import KiviFormat
from qattn_kernels.formats.kivi_norm.reference import KiviNormFormat
from qattn_kernels.layout import Window

Bits = Literal[2, 3, 4]


class Kivi(WindowedMethod):
    """KIVI: 2- to 4-bit keys by channel and values by token, with the newest tokens unquantized."""

    variants: ClassVar[tuple[dict[str, Any], ...]] = (
        {"bits": 4, "group_size": 64, "residual_length": 32, "token_norm": True},
        {"k_bits": 2, "v_bits": 3, "group_size": 128, "residual_length": 0, "rotate_k": "hadamard", "clip": 0.75},
        {"bits": 3, "group_size": 64, "residual_length": 0, "compensate_k": True},
        {"bits": 4, "group_size": 128, "residual_length": 0, "rotate_k": "hadamard", "equalize_k": True},
    )
    measured: ClassVar[tuple[Measured, ...]] = (
        Measured("kivi:bits=4", "quality compare bits tune"),
        Measured("kivi:bits=2", "quality compare bits released"),
        Measured("kivi:bits=2,group_size=128,residual_length=32", "quality bits tune decode released"),
        Measured("kivi:bits=2,group_size=128,residual_length=32,token_norm=true", "decode"),
        *(
            Measured(f"kivi:{pieces},group_size=128,residual_length=32", "quality", record="kivi_pieces")
            for pieces in (
                "bits=2,token_norm=true",
                "bits=2,rotate_k=hadamard",
                "bits=2,rotate_k=hadamard,token_norm=true",
                "k_bits=4,v_bits=2",
                "k_bits=4,v_bits=2,rotate_k=hadamard",
            )
        ),
        Measured("kivi:bits=2,clip=0.75,group_size=128,residual_length=32", "quality", record="low_bits"),
        Measured("kivi:bits=4,group_size=128", "decode released"),
        Measured("kivi", "trees-decode"),
    )

    bits: Bits = Field(2, description="bits of K and V")
    k_bits: Bits | None = Field(None, description="bits of K, if they differ from bits")
    v_bits: Bits | None = Field(None, description="bits of V, if they differ from bits")
    group_size: Literal[32, 64, 128] = Field(
        32, description="size of a group with one scale: tokens of K, channels of V"
    )
    clip: float = Field(0.0, ge=0, le=1, multiple_of=1 / 16, description=CLIP)
    token_norm: bool = Field(
        False,
        description="divide keys by their norms before quantization, so that the small keys of attention sinks keep "
        "their direction; adds 16 bits per key",
    )
    compensate_k: bool = Field(
        False,
        description="quantize a key's channels eight at a time, and let each correct earlier errors in the directions "
        "of the model's queries (GPTQ's rounding). patch runs the model once for that",
    )
    residual_length: int = Field(128, ge=0, le=128, description="newest tokens that are never packed")

    @classmethod
    def default_compute(cls) -> Arithmetic:
        return "model"

    def formats(self, layer: int, layers: int, heads: int) -> tuple[Format, Format]:
        k_bits, v_bits = (self.bits if own is None else own for own in (self.k_bits, self.v_bits))
        keys = KiviNormFormat if self.token_norm else KiviFormat
        k = keys(bits=k_bits, clip=self.clip, compensate=self.compensate_k)
        return k, KiviFormat(bits=v_bits, clip=self.clip, per_token=True)

    def window(self) -> Window:
        size = self.group_size
        return Window(block=size, span=size, residual=self.residual_length, horizon=self.crop_horizon)


METHOD = Kivi
