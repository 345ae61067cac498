"""Decode attention in plain PyTorch: the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import State
from qattn_kernels.ops.sink_pool.reference import packed_copies, sink_tiles
from qattn_kernels.reference.attention import Attended, attend
from qattn_kernels.reference.queries import short_queries
from qattn_kernels.reference.query_parts import QueryPart
from qattn_kernels.reference.rows import OpenSpan
from qattn_kernels.reference.tiles import FOREVER, Tiles, packed_tiles


def decode(
    parts: Sequence[QueryPart], state: State, spec: LayerSpec, open_span: OpenSpan, scores: Scores
) -> list[Attended]:
    """Compute the attention of a short call after its tokens were appended.

    A query at row position p reads a block that this call closed from its codes if single steps would. That holds if
    the block's last token lies before p and the step that closed it is not after p. Any other query reads the block
    from the ring, which still holds it. Drafted tokens therefore get the same numbers as single steps.

    Args:
        parts: queries of the call.
        state: the layer's tensors after the append.
        spec: the layer's formats.
        open_span: tokens that the call appended, and the open tokens before.
        scores: scale, cap, window and sinks of the scores.
    """
    window = spec.window
    n = torch.arange(open_span.pos.shape[1], device=open_span.pos.device)
    closes = n < open_span.closing[:, None]
    start = open_span.pos[:, 0, 0][:, None]
    end = start + (n + 1) * window.block - 1
    step = start + (n * window.block // window.span + 1) * window.span - 1 + window.residual
    packed_since = torch.where(closes, torch.maximum(end + 1, step), FOREVER).int()  # `[B, n]`

    packed = packed_tiles(state, spec, open_span.closed + open_span.closing)
    index = torch.arange(packed.pos.shape[2], device=open_span.pos.device)
    j = index - open_span.closed[:, None]
    late = torch.where(j >= 0, packed_since.gather(1, j.clamp(0, len(n) - 1).long()), 0)
    packed = packed._replace(since=torch.maximum(late[:, None, :, None], packed.since))
    if spec.sink_pool.num:
        packed = packed_copies(packed, state, open_span.closed, packed_since)
        packed = packed.joined(sink_tiles(state, spec, open_span.closed, packed_since))
    until = torch.where(closes, packed_since - 1, FOREVER).int()[..., None].expand_as(open_span.pos)
    since = torch.where(open_span.valid, open_span.pos, FOREVER)
    ring = Tiles(open_span.k, open_span.v, open_span.pos[:, None], since[:, None], until[:, None], open_span.keep)
    tiles = packed.joined(ring)
    tiles = tiles.latent() if spec.latent else tiles
    queries = [short_queries(part.q, scores.scale, spec.compute) for part in parts]
    return [
        attend(x, part.pos, tiles, scores, spec.compute, spec.sparsity, prefill=False)
        for x, part in zip(queries, parts, strict=True)
    ]
