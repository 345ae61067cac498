"""Attention mass, by which `select: attention` calls tokens sinks (SinkQ, Fig. 1f), in plain PyTorch.

A token's mass is the attention it got from its own query to the one at whose step its block closes, mean over the query
heads of its KV head. It must not depend on how tokens were cut into calls, nor stay when a crop takes its queries back.
So each query weighs only the tokens that stand open at its step, in their open form, where the first of them meet few
others and get more than in a whole context; a sink still gets nearly all. What a query gave each of them is kept in a
ring beside theirs until they close: `mass.ring` fp32 `[B, Hkv, ring, width]`, by the query's slot and, from
`_first_open` on, by the token.
"""

from __future__ import annotations

import torch

from qattn_kernels.layer.scores import Scores
from qattn_kernels.layout import State, Window
from qattn_kernels.reference.rows import OpenSpan, pick
from qattn_kernels.reference.tiles import last_hidden

QUERIES = 32  # at a time: each has keys of its own


def _width(window: Window) -> int:
    """The most tokens that a query can find open, itself included."""
    return window.span + window.residual


def _first_open(state: State, window: Window, pos: torch.Tensor) -> torch.Tensor:
    """Row position of the first token that stands open when the one at `pos` `[B, n]` comes, as in single steps."""
    origin = state["origin"][:, None]
    return origin + (pos - origin - window.residual).clamp(min=0) // window.span * window.span


def given(
    q: torch.Tensor, q_pos: torch.Tensor, state: State, window: Window, open_span: OpenSpan, scores: Scores
) -> torch.Tensor:
    """What the query of each token of an open span gave the open tokens: fp32 `[B, Hkv, n, block, width]`, zeros past
    the row's end. Asked before the call is appended; `q` `[B, Hq, T, D]`, real tokens first, `q_pos` `[B, T]`."""
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
    """fp32 `[B, Hkv, T, width]` of new queries. Made in fp64, so that no order of summing decides."""
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
    """fp64 `[B, Hkv, n, block]` of the tokens of an open span, for blocks that the call closes."""
    assert open_span.given is not None
    rows, pos, block = open_span.given.flatten(2, 3), open_span.pos.flatten(1), window.block
    found = []
    for j in range(open_span.pos.shape[1]):
        first = j * block // window.span * window.span
        queries = slice(first, first + _width(window))  # the last of them closes the block
        column = open_span.pos[:, j, None] - _first_open(state, window, pos[:, queries])[..., None]
        index = column.clamp(0, _width(window) - 1).long()[:, None].expand(-1, rows.shape[1], -1, -1)
        got = rows[:, :, queries].gather(3, index)
        inside = (column >= 0) & (column < _width(window))
        found.append(torch.where(inside[:, None], got, 0.0).double().sum(2).float())
    return torch.stack(found, 2).double()
