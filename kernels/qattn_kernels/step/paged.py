"""A short call over blocks that lie in a pool of pages, in kernels. Its specification is the operator over an arena
into which the pages were copied."""

from __future__ import annotations

import torch

from qattn_kernels.formats.base import Low
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import State
from qattn_kernels.step.operator import in_kernels


def reads_pages(spec: LayerSpec, heads: int) -> bool:
    """Whether kernels read and write the blocks of such a layer in a pool: no sinks are taken out of them, they close
    one at a time, and heads have one width."""
    one_width = all(fmt.core.low_kind(heads) <= Low.ALL for fmt in (spec.k, spec.v))
    return spec.impl == "triton" and not spec.sink_pool.num and spec.window.span == spec.window.block and one_width


def attend_pages(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    span: torch.Tensor,
    state: State,
    table: torch.Tensor,
    spec: LayerSpec,
    scores: Scores,
) -> torch.Tensor:
    """Write the new keys and values of at most `SHORT_CALL` tokens a row, close full blocks, and attend.

    Args:
        query: `[R, Hq, T, D]`. key, value: `[R, Hkv, T, D]`. span: int32 `[R, 2]`, as in `step.operator.attend`.
        state: the state tensors, those without blocks of R rows, those with blocks of one row of as many as there are
            pages. Changed in place.
        table: int32 `[R, NB]`, contiguous: page of each row's blocks, those that the call begins included.

    Returns:
        `[R, Hq, T, Dv]` in the query's dtype.
    """
    return in_kernels(query, key, value, span, state, spec, scores, 0, table)[0]
