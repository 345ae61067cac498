"""SinkQ: KIVI with the attention sinks of each head kept out of the packed blocks (paper: SinkQ)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qattn_hf.methods.base import Measured
from qattn_hf.methods.kivi import Kivi


class SinkQ(Kivi):
    """SinkQ: KIVI with attention sinks, the tokens with the smallest keys, kept unquantized.

    Its settings are the same as in `kivi`, with other defaults. `kivi` has no sink pool by default.
    """

    variants = ({"group_size": 32, "residual_length": 20, "sink_window": 2, "sink_skip_layers": 0},)
    measured = (
        Measured("sinkq", "quality compare bits tune decode prefill released"),
        Measured("sinkq:sink_skip_layers=0", "quality"),
        Measured("sinkq:rotate_k=hadamard", "quality", record="low_bits"),
        Measured("sinkq:clip=0.75", "quality", record="low_bits"),
        Measured("sinkq:rotate_k=hadamard,clip=0.75", "quality", record="low_bits"),
        Measured("sinkq:bits=3,rotate_k=hadamard", "quality", record="low_bits"),
        Measured("low2", "compare bits decode prefill tune released"),
        Measured("low3", "compare bits decode prefill tune released"),
        Measured("low4", "compare bits decode prefill tune released"),
        Measured("sinkq:group_size=32", "bits"),
    )

    group_size: Literal[32, 64, 128] = Field(
        128, description="size of a group with one scale: tokens of K, channels of V"
    )
    residual_length: int = Field(32, ge=0, le=128, description="newest tokens that are never packed")
    sink_num: int = Field(3, ge=0, le=8, description="attention sinks per head that are not packed; 0 means none")
    sink_window: int = Field(32, ge=0, le=128, description="sinks that left the pool last and stay unpacked too")
    sink_skip_layers: int = Field(2, ge=0, description="first layers without attention sinks")


METHOD = SinkQ
