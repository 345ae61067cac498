"""Prefill attention in plain PyTorch: the specification."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qattn_kernels.formats import Format, Operand
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import State
from qattn_kernels.ops.sink_pool.reference import sink_tiles
from qattn_kernels.reference.attention import Attended, attend
from qattn_kernels.reference.operands import operands
from qattn_kernels.reference.queries import long_queries
from qattn_kernels.reference.rows import OpenSpan, open_span_blocks
from qattn_kernels.reference.tiles import FOREVER, Tiles, packed_tiles


def _prefill_form(fmt: Format, state: State, tokens: Operand, full: torch.Tensor) -> Operand:
    """Blocks that the call fills in the form of the format's prefill, the unfinished tail as it stands open.

    A tail without codes of its own, or without their mean, is seen as if its block closed here, so that all of a
    prefill has one form.
    """
    formed = fmt.block_form(tokens, state)
    if tokens.scale is None or formed.mean is not None:
        return formed
    full = full[:, None, :, None]
    x = torch.where(full[..., None], formed.x, tokens.x)
    return Operand(x, torch.where(full, formed.scales, tokens.scale))


def packed_past(state: State, spec: LayerSpec) -> Tiles:
    """What the queries of a long call see of the blocks that were closed before it; asked before anything changes."""
    packed = packed_tiles(state, spec, state["closed"])
    return packed.joined(sink_tiles(state, spec, state["closed"], None)) if spec.sink_pool.num else packed


def prefill(
    q: torch.Tensor,
    q_pos: torch.Tensor,
    past: Tiles,
    state: State,
    spec: LayerSpec,
    open_span: OpenSpan,
    scores: Scores,
) -> Attended:
    """Attention of a long call, TurboAttention Algorithm 1, after its tokens were appended.

    Args:
        q: `[B, Hq, T, D]`, real tokens first. q_pos: int32 `[B, T]` row positions, negative for padding.
        past: `packed_past` of the call. state: the layer's tensors.
        open_span: the open tokens before the call and the new ones.
    """
    closes = torch.arange(open_span.pos.shape[1], device=q.device) < open_span.closing[:, None]
    since = torch.where(open_span.valid, open_span.pos, FOREVER)[:, None]
    k = _prefill_form(spec.k, side_of(state, "k"), open_span.k, closes)
    v = _prefill_form(spec.v, side_of(state, "v"), open_span.v, closes)
    fresh = Tiles(k, v, open_span.pos[:, None], since, torch.full_like(since, FOREVER), open_span.keep)
    before = past.pos.shape[2]

    def reach(end: int) -> int:
        return before + open_span_blocks(spec.window, end)

    return attend_all(q, q_pos, past.joined(fresh), spec, scores, reach)


def attend_all(
    q: torch.Tensor, q_pos: torch.Tensor, tiles: Tiles, spec: LayerSpec, scores: Scores, reach: Callable[[int], int]
) -> Attended:
    """Queries of a long call over all that it sees; the first `end` queries see no tile from `reach(end)` on."""
    parts = []
    tiles = tiles.latent() if spec.latent else operands(tiles, spec)
    queries = long_queries(q, scores.scale, spec.compute, q_pos >= 0)
    rows = spec.compute.block_q  # what shares a scale of the weights too, with `p_scale: tile`
    for i in range(0, q.shape[2], rows):  # the scores of all queries at once would not fit a long prompt
        some = tiles.first(reach(i + rows))  # later tiles are later tokens
        part = queries.part(i, i + rows), q_pos[:, i : i + rows]
        parts.append(attend(*part, some, scores, spec.compute, spec.sparsity, prefill=True))
    return Attended(torch.cat([p.out for p in parts], 2), torch.cat([p.lse for p in parts], 2))
