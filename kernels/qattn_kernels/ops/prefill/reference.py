"""Prefill attention in plain PyTorch: the specification."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from qattn_kernels.formats import Format, Operand
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import State
from qattn_kernels.ops.sink_pool.reference import sink_tiles
from qattn_kernels.reference.attention import Attended, attend
from qattn_kernels.reference.operands import operands
from qattn_kernels.reference.queries import Queries, long_queries
from qattn_kernels.reference.query_parts import QueryPart
from qattn_kernels.reference.rows import OpenSpan, open_span_blocks, pick
from qattn_kernels.reference.tiles import FOREVER, Tiles, packed_tiles


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
    for i in range(0, part.q.shape[2], rows):
        some = tiles.first(reach(part.ahead + i + rows))  # later tiles are later tokens
        chunk = queries.part(i, i + rows), part.pos[:, i : i + rows]
        chunks.append(attend(*chunk, some, scores, spec.compute, spec.sparsity, prefill=True))
    return Attended(torch.cat([x.out for x in chunks], 2), torch.cat([x.lse for x in chunks], 2))
