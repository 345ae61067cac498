"""Split the queries of a call into parts that are computed together: tokens, and the padding after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from qattn_kernels.reference.attention import Attended
from qattn_kernels.reference.rows import columns_back, real_first


class QueryPart(NamedTuple):
    """Queries that are computed together. Padding shares no scale and no mean with the tokens of its row.

    Attributes:
        q: `[B, Hq, T, D]`, the part's queries first in each row.
        pos: int32 `[B, T]`, row positions, negative after the part's last query.
        span: int32 `[B, 2]`, first column of the part and its count of columns.
        ahead: upper bound of the call's tokens before the part's first query.
    """

    q: torch.Tensor
    pos: torch.Tensor
    span: torch.Tensor
    ahead: int


def query_parts(q: torch.Tensor, span: torch.Tensor, length: torch.Tensor) -> list[QueryPart]:
    """Return the parts of a call, tokens first. Padding before a row's first token is in no part.

    Padding after a row's tokens sees all of them. It has the row position of a token in its column, so that a window
    hides the same tokens from both. A call of one column skips padding, because no later token reads that column.

    Args:
        q: `[B, Hq, T, D]`, columns in the model's order.
        span: int32 `[B, 2]`, first real column and count of each row.
        length: int32 `[B]`, tokens before the call.
    """
    columns = q.shape[2]
    end = span.sum(1)
    after = torch.stack([end, columns - end], 1).int()
    spans = [(span, 0)]
    # check the counts on a CPU only: on a GPU that would wait for the device
    if columns > 1 and (span.device.type != "cpu" or bool((end < columns).any())):
        spans.append((after, columns))
    t, start = torch.arange(columns, device=q.device), (length - span[:, 0])[:, None]
    return [
        QueryPart(real_first(q, part), torch.where(t < part[:, 1:], start + part[:, :1] + t, -1).int(), part, ahead)
        for part, ahead in spans
    ]


def in_columns(
    parts: Sequence[QueryPart], results: Sequence[Attended], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of all parts in the call's column order.

    Outputs are `[B, Hq, T, Dv]` in `dtype`, log-sum-exp fp32 `[B, Hq, T]`. Columns of no part have zeros."""
    outs = [columns_back(x.out.to(dtype), part.span) for part, x in zip(parts, results, strict=True)]
    lses = [columns_back(x.lse[..., None], part.span)[..., 0] for part, x in zip(parts, results, strict=True)]
    return sum(outs[1:], outs[0]), sum(lses[1:], lses[0])
