"""Prefill attention in plain PyTorch: the specification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from qattn_kernels.formats import Format, Operand
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import Compute, LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import State
from qattn_kernels.ops.sink_pool.reference import sink_tiles
from qattn_kernels.reference.attention import Attended, attend
from qattn_kernels.reference.finite_queries import attend_finite
from qattn_kernels.reference.operands import fp8_values, operands
from qattn_kernels.reference.queries import Queries, long_queries
from qattn_kernels.reference.query_parts import QueryPart
from qattn_kernels.reference.rows import OpenSpan, open_span_blocks, pick
from qattn_kernels.reference.tiles import FOREVER, Tiles, last_hidden, packed_tiles, visible


def _prefill_form(fmt: Format, state: State, tokens: Operand, full: torch.Tensor) -> Operand:
    """Return the blocks that the call fills in the form of the format's prefill, and the unfinished tail in open form.

    A tail without codes or without a mean is quantized as if its block closed now, so that a prefill has one form."""
    formed = fmt.block_form(tokens, state)
    if tokens.scale is None or formed.mean is not None:
        return formed
    full = full[:, None, :, None]
    x = torch.where(full[..., None], formed.x, tokens.x)
    return Operand(x, torch.where(full, formed.scales, tokens.scale))


def packed_past(state: State, spec: LayerSpec) -> Tiles:
    """Return what a long call sees of earlier closed blocks. Call it before the state changes."""
    packed = packed_tiles(state, spec, state["closed"])
    return packed.joined(sink_tiles(state, spec, state["closed"], None)) if spec.sink_pool.num else packed


def prefill(
    parts: Sequence[QueryPart],
    past: Tiles,
    state: State,
    spec: LayerSpec,
    open_span: OpenSpan,
    scores: Scores,
) -> list[Attended]:
    """Compute the attention of a long call (TurboAttention, Algorithm 1) after its tokens were appended.

    Args:
        parts: queries of the call.
        past: `packed_past` of the call.
        state: the layer's tensors.
        spec: the layer's formats and arithmetic.
        open_span: open tokens before the call, and the new tokens.
        scores: scale, cap, window and sinks of the scores.
    """
    closes = torch.arange(open_span.pos.shape[1], device=open_span.pos.device) < open_span.closing[:, None]
    since = torch.where(open_span.valid, open_span.pos, FOREVER)[:, None]
    k = _prefill_form(spec.k, side_of(state, "k"), open_span.k, closes)
    v = _prefill_form(spec.v, side_of(state, "v"), open_span.v, closes)
    fresh = Tiles(k, v, open_span.pos[:, None], since, torch.full_like(since, FOREVER), open_span.keep)
    before = past.pos.shape[2]

    def reach(end: int) -> int:
        return before + open_span_blocks(spec.window, end)

    return attend_all(parts, past.joined(fresh), spec, scores, reach)


def attend_all(
    parts: Sequence[QueryPart], tiles: Tiles, spec: LayerSpec, scores: Scores, reach: Callable[[int], int]
) -> list[Attended]:
    """Attend with every part of a long call to all its tiles. The first `end` tokens see no tile from `reach(end)` on.

    Smoothing subtracts from padding the same mean as from the last token before it."""
    tiles = tiles.latent() if spec.latent else operands(tiles, spec)
    results, mean = [], None
    for part in parts:
        queries = long_queries(part.q, scores.scale, spec.compute, part.pos >= 0, mean)
        results.append(_in_chunks(part, queries, tiles, spec, scores, reach))
        if queries.mean is not None and mean is None:
            mean = pick(queries.mean, (part.span[:, 1:] - 1).clamp(min=0))
    return results


def _in_chunks(
    part: QueryPart, queries: Queries, tiles: Tiles, spec: LayerSpec, scores: Scores, reach: Callable[[int], int]
) -> Attended:
    """Attend with one part, some queries at a time: the scores of all queries of a long prompt would not fit in
    memory."""
    chunks, rows = [], spec.compute.block_q  # also the queries that share a weight scale with `p_scale: tile`
    alike = _alike(part, queries, tiles, spec)
    for i in range(0, part.q.shape[2], rows):
        some = tiles.first(reach(part.ahead + i + rows))  # later tiles are later tokens
        chunk = queries.part(i, i + rows), part.pos[:, i : i + rows]
        found = _attend_alike(*chunk, some, scores, spec.compute) if alike else None
        chunks.append(found or attend(*chunk, some, scores, spec.compute, spec.sparsity, prefill=True))
    return Attended(torch.cat([x.out for x in chunks], 2), torch.cat([x.lse for x in chunks], 2))


def _alike(part: QueryPart, queries: Queries, tiles: Tiles, spec: LayerSpec) -> bool:
    """Return whether `_attend_alike` computes a part: on a CPU, if all rows have equally many tokens."""
    compute = spec.compute
    shared = compute.p_scale == "tile" or fp8_values(compute) or queries.mean is not None or tiles.v.mean is not None
    if part.q.device.type != "cpu" or shared or bool(queries.broken.any()):
        return False
    return bool((part.pos == part.pos[:1]).all()) and bool((part.pos >= 0).all())


def _attend_alike(q: Queries, q_pos: torch.Tensor, tiles: Tiles, scores: Scores, compute: Compute) -> Attended | None:
    """Compute `attend` with masks for those tiles alone that hide a token. None if a query sees no token."""
    sees_all = tiles.keep & (tiles.since <= q_pos.min()) & (q_pos.max() <= tiles.until)
    if scores.window:
        sees_all &= tiles.pos > last_hidden(q_pos, scores.window).max()
    partly = (~sees_all).any(3).flatten(0, 1).any(0).nonzero()[:, 0].tolist()

    def hide(s: torch.Tensor) -> None:
        by_query = s.unflatten(2, (-1, q_pos.shape[1]))  # [B, Hkv, G, T, n, block]
        for j in partly:
            see = visible(tiles.map(partial(torch.narrow, dim=2, start=j, length=1)), q_pos, scores.window)
            by_query.narrow(4, j, 1).masked_fill_(~see[:, :, None], -torch.inf)

    out, lse = attend_finite(q.exact, q.coded, tiles.k, tiles.v, hide, compute, scores)
    return Attended(out, lse) if bool(lse.isfinite().all()) else None
