"""A short call over blocks that lie in a pool of pages, in kernels. Its specification is the operator over an arena
into which the pages were copied."""

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
    """The memory of a layer whose blocks lie in a pool.

    Attributes:
        blocks: uint8, the state tensors with blocks, of one row with as many blocks as there are pages. rows: uint8,
            the others, of as many rows as there may be.
        state: gives the state tensors of the first so many rows: views of the two.
        name: says what lies where in them.
    """

    blocks: torch.Tensor
    rows: torch.Tensor
    state: Callable[[int], State]
    spec: LayerSpec
    name: str


def reads_pages(spec: LayerSpec, heads: int) -> bool:
    """Whether kernels read and write the blocks of such a layer in a pool: they close one at a time, and heads have one
    width."""
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
    """Write the new keys and values of at most `SHORT_CALL` tokens a row, close full blocks, and attend.

    Args:
        query: `[R, Hq, T, D]`. key, value: `[R, Hkv, T, D]`. span: int32 `[R, 2]`, as in `step.operator.attend`.
        table: int32 `[R, NB]`, contiguous: page of each row's blocks, those that the call begins included.

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
