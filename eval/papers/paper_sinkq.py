"""The method `paper_sinkq`: SinkQ with settings only for comparisons with the paper, without kernels."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from pydantic import Field

from qattn_hf.methods import register
from qattn_hf.methods.sinkq import SinkQ
from qattn_kernels.layout import SinkPool


@register
class PaperSinkQ(SinkQ):
    """`sinkq` with all criteria of Fig. 1f, and with a pool that is chosen from the whole prompt."""

    moved: ClassVar = {}
    variants = (
        {"group_size": 32, "residual_length": 20, "sink_window": 2, "sink_select": "attention", "sink_skip_layers": 0},
    )

    sink_select: Literal["smallest_key", "largest_key", "attention", "random"] = Field(
        "smallest_key", description="which tokens are sinks"
    )
    sink_exclude: bool = Field(True, description="leave sinks out of their block's statistics too")
    sink_prefill: Literal["group", "whole"] = Field(
        "group", description="the pool competes with each block, or (whole) with the first call at once as in the paper"
    )

    def sink_pool(self, layer: int) -> SinkPool:
        pool = super().sink_pool(layer)
        if pool.num == 0:
            return pool
        return dataclasses.replace(pool, select=self.sink_select, exclude=self.sink_exclude, prefill=self.sink_prefill)
