"""The queries of a decode program in the forms that formats multiply with keys: columns of a tile."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.jit.math import TINY, broken, round_even
from qattn_kernels.jit.rows import queries_end
from qattn_kernels.jit.split_int8 import split_int8


class QuerySource(NamedTuple):
    """The queries of a call, and their strides over rows, heads and columns."""

    x: Any
    strides: Any


class QueryTile(NamedTuple):
    """What `scores` of a format takes as `query`. Queries that are not finite stand as zeros in all of it.

    Attributes:
        raw: `[DP, Q]` as the model made them, in its dtype. raw_scale: the scale of their scores, in log2 units.
        scaled: fp32 `[DP, Q]`, `raw` times `raw_scale`.
        operand: `scaled / scale` for a product: INT8 pairs `[DP, 2 Q]` (see `split_int8`), or fp16 `[DP, Q]`.
        scale: fp32 `[Q]`, what a unit of `operand` stands for.
        normalized: fp32 `[DP, Q]`, `scaled` in [-127, 127] by the largest number of each query: what INT8 pairs are
            made of.
    """

    raw: Any
    raw_scale: Any
    scaled: Any
    operand: Any
    scale: Any
    normalized: Any


@triton.jit
def load_queries(queries, b, h, n, t, row, T, C: tl.constexpr):
    """Queries `n` of KV head `h`, of tokens `t`: `[DP, Q]` as the model made them, zeros beyond the row's
    queries. A step does not wait for the row: if that has no token, its query is loaded too, and read by nobody.
    """
    SIDE: tl.constexpr = C.K
    d, head = tl.arange(0, SIDE.DP), h * C.G + n % C.G
    if C.ONE_TOKEN:
        column, there = t, t == 0
    else:
        column, there = row.first + t, t < queries_end(row, T, C)
    strides = queries.strides
    base = b.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + column.to(tl.int64) * strides[2]
    spread = tl.max_contiguous(d, 1)  # so lanes hold neighbours, and bytes made of them meet in no bank
    return tl.load(queries.x + base[None, :] + spread[:, None], mask=there[None, :] & (d < SIDE.D)[:, None], other=0.0)


@triton.jit
def query_tile(q, scale, C: tl.constexpr):
    """The `QueryTile` of what `load_queries` read, and which queries are not finite."""
    nonfinite = broken(q.to(tl.float32), 0)
    q = tl.where(nonfinite[None, :], 0.0, q)
    scaled = q.to(tl.float32) * scale
    top = tl.max(tl.abs(scaled), 0) + TINY
    normalized = scaled * (127.0 / top)[None, :]
    if C.Q_LEVELS < 8:  # asked for; INT8 pairs err less than eight bits do
        normalized = round_even(normalized * (C.Q_LEVELS / 127.0)) * (127.0 / C.Q_LEVELS)
    if C.N > C.Q:
        operand = split_int8(normalized * 256.0, C)
        return QueryTile(q, scale, scaled, operand, top * (1.0 / 127.0), normalized), nonfinite
    else:
        operand = (scaled * (1.0 / top)[None, :]).to(tl.float16)
        return QueryTile(q, scale, scaled, operand, top, normalized), nonfinite
