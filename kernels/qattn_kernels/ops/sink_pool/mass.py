"""Attention mass, the criterion of `select: attention` for sinks (SinkQ, Fig. 1f), in plain PyTorch.

A token's mass is the attention it received, averaged over the query heads of its KV head. The sum covers the queries
from the token's own to the one whose step closes the token's block. It must not depend on how tokens were split into
calls, and a crop must undo it. Each query therefore weighs only the tokens that are open at its step, in open form.

The first open tokens then compete with few others and receive more than in a full context. A sink still receives nearly
all attention. A ring keeps each query's weights until its tokens close: `mass.ring` fp32 `[B, Hkv, ring, width]`,
indexed by the query's slot, then by token from `_first_open` on."""

from __future__ import annotations

import torch

from qattn_kernels.layer.scores import Scores
from qattn_kernels.layout import State, Window
from qattn_kernels.reference.rows import OpenSpan, pick
from qattn_kernels.reference.tiles import last_hidden

QUERIES = 32  # queries at a time: each has different keys


def _width(window: Window) -> int:
    """Return the maximum number of open tokens that a query can see, itself included."""
    return window.span + window.residual


def _first_open(state: State, window: Window, pos: torch.Tensor) -> torch.Tensor:
    """Return the row position of the first open token when the token at `pos` `[B, n]` arrives, as in single steps."""
    origin = state["origin"][:, None]
    return origin + (pos - origin - window.residual).clamp(min=0) // window.span * window.span


def given(
    q: torch.Tensor, q_pos: torch.Tensor, state: State, window: Window, open_span: OpenSpan, scores: Scores
) -> torch.Tensor:
    """Return the weights that each token's query gave the open tokens: fp32 `[B, Hkv, n, block, width]`.

    Zeros after the row's end. Call it before the append. `q` `[B, Hq, T, D]` has real tokens first; `q_pos` is
    `[B, T]`."""
    parts = [
        _weights(q[:, :, i : i + QUERIES], q_pos[:, i : i + QUERIES], state, window, open_span, scores)
        for i in range(0, q.shape[2], QUERIES)
    ]
    pos, ring = open_span.pos.flatten(1), state["mass.ring"]
    fresh = pos - state["length"][:, None]
    new = pick(torch.cat(parts, 2), fresh.clamp(0, q.shape[2] - 1))
    rows = torch.where((fresh < 0)[:, None, :, None], pick(ring, pos % ring.shape[2]), new)
    return torch.where(open_span.valid.flatten(1)[:, None, :, None], rows, 0.0).unflatten(2, open_span.pos.shape[1:])


def _weights(
    q: torch.Tensor, q_pos: torch.Tensor, state: State, window: Window, open_span: OpenSpan, scores: Scores
) -> torch.Tensor:
    """Return the weights fp32 `[B, Hkv, T, width]` of new queries, computed in fp64 so that summation order does not
    matter."""
    pos = _first_open(state, window, q_pos)[..., None] + torch.arange(_width(window), device=q.device)
    slot = pos - state["open_start"][:, None, None]
    index = slot.clamp(0, open_span.pos[0].numel() - 1).flatten(1)
    keys = pick(open_span.k.dequantize().flatten(2, 3), index).double().unflatten(2, pos.shape[1:])
    keep = pick(open_span.keep.flatten(2)[..., None], index)[..., 0].unflatten(2, pos.shape[1:])
    see = (slot >= 0) & (pos <= q_pos[..., None])
    if scores.window:
        see &= pos > last_hidden(q_pos[..., None], scores.window)
    heads = keys.shape[1]
    s = torch.einsum("bhgtd,bhtwd->bhgtw", q.double().unflatten(1, (heads, -1)) * scores.scale, keys)
    s = scores.softcap * torch.tanh(s / scores.softcap) if scores.softcap else s
    weights = s.masked_fill(~(see[:, None] & keep)[:, :, None], -torch.inf).softmax(-1)
    return weights.nan_to_num(0.0).mean(2).float()


def mass(state: State, window: Window, open_span: OpenSpan) -> torch.Tensor:
    """Return the mass fp64 `[B, Hkv, n, block]` of the tokens of an open span, for blocks that the call closes."""
    assert open_span.given is not None
    rows, pos, block = open_span.given.flatten(2, 3), open_span.pos.flatten(1), window.block
    found = []
    for j in range(open_span.pos.shape[1]):
        first = j * block // window.span * window.span
        queries = slice(first, first + _width(window))  # the last of these queries closes the block
        column = open_span.pos[:, j, None] - _first_open(state, window, pos[:, queries])[..., None]
        index = column.clamp(0, _width(window) - 1).long()[:, None].expand(-1, rows.shape[1], -1, -1)
        got = rows[:, :, queries].gather(3, index)
        inside = (column >= 0) & (column < _width(window))
        found.append(torch.where(inside[:, None], got, 0.0).double().sum(2).float())
    return torch.stack(found, 2).double()
