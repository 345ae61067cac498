"""Queries of a decode program, in the forms that formats multiply with keys. Queries are columns of a tile."""

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
    """The `query` argument of a format's `scores`. Non-finite queries are zeros in every field.

    Attributes:
        raw: `[DP, Q]`, queries in the model's dtype.
        raw_scale: scale of the queries' scores, in log2 units.
        scaled: fp32 `[DP, Q]`, `raw` times `raw_scale`.
        operand: `scaled / scale` for a matrix product: INT8 pairs `[DP, 2 Q]` (see `split_int8`), or fp16 `[DP, Q]`.
        scale: fp32 `[Q]`, value of one unit of `operand`.
        normalized: fp32 `[DP, Q]`, `scaled` mapped to [-127, 127] by each query's largest magnitude. INT8 pairs are
            made from it.
    """

    raw: Any
    raw_scale: Any
    scaled: Any
    operand: Any
    scale: Any
    normalized: Any


@triton.jit
def load_queries(queries, b, h, n, t, row, T, C: tl.constexpr):
    """Load queries `n` `[Q]` of KV head `h`, which belong to tokens `t` `[Q]` of the row: `[DP, Q]` in the model's
    dtype, zeros after the row's queries.

    A step loads its query before the row is known. If the row has no token, the loaded query goes unused."""
    SIDE: tl.constexpr = C.K
    d, head = tl.arange(0, SIDE.DP), h * C.G + n % C.G
    if C.ONE_TOKEN:
        column, there = t, t == 0
    else:
        column, there = row.first + t, t < queries_end(row, T, C)
    strides = queries.strides
    base = b.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + column.to(tl.int64) * strides[2]
    spread = tl.max_contiguous(d, 1)  # lanes hold neighbours, so bytes packed from them avoid bank conflicts
    return tl.load(queries.x + base[None, :] + spread[:, None], mask=there[None, :] & (d < SIDE.D)[:, None], other=0.0)


@triton.jit
def query_tile(q, scale, C: tl.constexpr):
    """Return the `QueryTile` of queries `q` `[DP, Q]`, and bool `[Q]`: which queries are not finite.

    `scale`: scale of the scores, in log2 units."""
    nonfinite = broken(q.to(tl.float32), 0)
    q = tl.where(nonfinite[None, :], 0.0, q)
    scaled = q.to(tl.float32) * scale
    top = tl.max(tl.abs(scaled), 0) + TINY
    normalized = scaled * (127.0 / top)[None, :]
    if C.Q_LEVELS < 8:  # only on request: INT8 pairs are more precise than 8 bits
        normalized = round_even(normalized * (C.Q_LEVELS / 127.0)) * (127.0 / C.Q_LEVELS)
    if C.N > C.Q:
        operand = split_int8(normalized * 256.0, C)
        return QueryTile(q, scale, scaled, operand, top * (1.0 / 127.0), normalized), nonfinite
    else:
        operand = (scaled * (1.0 / top)[None, :]).to(tl.float16)
        return QueryTile(q, scale, scaled, operand, top, normalized), nonfinite
