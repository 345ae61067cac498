"""A short call over blocks in a page pool, in kernels.

The specification is the operator over an arena into which the pages were copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from qattn_kernels.formats.traits import Low, low_kind
from qattn_kernels.launch.plan import planned
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import State
from qattn_kernels.step.operator import in_kernels


class Pages(NamedTuple):
    """Memory of a layer whose blocks are in a page pool.

    Attributes:
        blocks: uint8, the state tensors with blocks, as one row with one block per page.
        rows: uint8, the other state tensors, for the maximum number of rows.
        state: function that returns the state tensors of the first `n` rows, as views of `blocks` and `rows`.
        spec: the layer's formats and arithmetic.
        name: text that identifies the layout of both.
    """

    blocks: torch.Tensor
    rows: torch.Tensor
    state: Callable[[int], State]
    spec: LayerSpec
    name: str


def reads_pages(spec: LayerSpec, heads: int) -> bool:
    """Return whether kernels can use a page pool for this layer.

    Requires Triton, blocks that close one at a time, and heads with one bit width."""
    one_width = all(low_kind(fmt, heads) <= Low.ALL for fmt in (spec.k, spec.v))
    return spec.impl == "triton" and spec.window.span == spec.window.block and one_width


def attend_pages(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    span: torch.Tensor,
    table: torch.Tensor,
    pages: Pages,
    scores: Scores,
) -> torch.Tensor:
    """Write the new keys and values of at most `SHORT_CALL` tokens per row, pack full blocks, and attend.

    Args:
        query: `[R, Hq, T, D]`.
        key, value: `[R, Hkv, T, D]`.
        span: int32 `[R, 2]`, as in `step.operator.attend`.
        table: int32 `[R, NB]`, contiguous: page of each block of a row, including blocks that the call starts.
        pages: memory of the layer.
        scores: scale, cap, window and sinks of the scores.

    Returns:
        `[R, Hq, T, Dv]` in the query's dtype.
    """

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        return in_kernels(query, key, value, span, pages.state(len(table)), pages.spec, scores, 0, table)

    tensors, sinks = (query, key, value, span, table), scores.sinks
    shapes = tuple([(x.shape, x.stride(), x.dtype) for x in (tensors if sinks is None else (*tensors, sinks))])
    settings = scores.scale, scores.softcap, scores.window
    inputs = pages.blocks, pages.rows, *tensors, sinks
    return planned((pages.name, shapes, settings, query.device), inputs, compute, arenas=2)[0]
