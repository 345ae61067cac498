"""Rows of a cache: where the tokens of a call are, and the open span that every call works on.

Open tokens are those whose block is not closed yet. They are in the ring, or in the arena for a format without a ring.
The open span is a row's open tokens plus the call's new tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from qattn_kernels.formats import Arrival, Format, Operand
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import State, Window


class OpenSpan(NamedTuple):
    """Open span of each row: its open tokens before a call, then the call's new tokens, cut into blocks.

    Block `j` of the open span is block `closed + j` of the arenas.

    Attributes:
        pos: `[B, n, block]`, row positions.
        valid: bool `[B, n, block]`, false past the row's end.
        keep: bool `[B, H, n, block]`, false past the row's end and for masked (non-finite) tokens.
        k, v: keys and values in the form of the ring, `[B, H, n, block, D]`.
        closed: `[B]`, closed blocks before the call.
        closing: `[B]`, number of leading blocks that the call closes.
        chosen: bool `[B, H, n, block]`, tokens that the sink pool took.
        given: attention weights that each token's query gave the open tokens (`ops.sink_pool.mass`); None unless the
            pool selects by them.
    """

    pos: torch.Tensor
    valid: torch.Tensor
    keep: torch.Tensor
    k: Operand
    v: Operand
    closed: torch.Tensor
    closing: torch.Tensor
    chosen: torch.Tensor
    given: torch.Tensor | None = None


def open_span_blocks(window: Window, tokens: int) -> int:
    """Return the number of blocks in an open span: room for the maximum open tokens of a row, and for `tokens` new
    ones."""
    return -(-(window.span - 1 + window.residual + tokens) // window.block)


def pick(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return tokens `index` `[B, n]` of `x` `[B, H, N, D]`: `[B, H, n, D]`."""
    if len(x) == 1:  # copies whole tokens, where `gather` looks up each number
        return x.index_select(2, index[0])
    return x.gather(2, index.long()[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def pick_each(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return tokens `index` `[B, H, n]`, different ones per head, of `x` `[B, H, N, D]`: `[B, H, n, D]`."""
    return x.gather(2, index.long()[..., None].expand(-1, -1, -1, x.shape[3]))


def real_first(x: torch.Tensor, span: torch.Tensor) -> torch.Tensor:
    """Move the real columns of each row of `x` `[B, H, T, D]` to the front.

    `span` `[B, 2]`: leading padding columns of a row, and the number of real columns after them."""
    if span.device.type == "cpu" and not span[:, 0].any():  # the host can look without waiting
        return x.contiguous()
    tokens = torch.arange(x.shape[2], device=x.device)
    return pick(x, (tokens + span[:, :1]).clamp(max=x.shape[2] - 1))


def fitting(state: State, window: Window, span: torch.Tensor) -> torch.Tensor:
    """Limit `span` int32 `[B, 2]` (first real column, count) to the tokens that a row has room for."""
    room = state["block_len"].shape[1] * window.block - state["closed"] * window.block
    room = room - state["length"] + state["open_start"]
    return torch.stack([span[:, 0], torch.minimum(span[:, 1], room)], 1).int()


def padding_end(span: torch.Tensor, columns: int) -> torch.Tensor:
    """Return how many of a call's `columns` reach to the end of its last padding, over all rows; 0-d.

    `span` `[B, 2]`: first real column and count of each row."""
    first, count = span.unbind(1)
    return torch.where(first + count < columns, columns, first).max()


def columns_back(x: torch.Tensor, span: torch.Tensor) -> torch.Tensor:
    """Move the leading real columns of `x` `[B, H, T, D]` back to their columns in `span` `[B, 2]`.

    The inverse of `real_first`. Padding columns get zeros."""
    if span.device.type == "cpu" and span.tolist() == [[0, x.shape[2]]] * len(x):
        return x.contiguous()
    tokens = torch.arange(x.shape[2], device=x.device) - span[:, :1]
    real = (tokens >= 0) & (tokens < span[:, 1:])
    return torch.where(real[:, None, :, None], pick(x, tokens.clamp(0, x.shape[2] - 1)), 0)


@lru_cache(maxsize=64)
def _weights(device: torch.device) -> torch.Tensor:
    """Return the values of a byte's bits, uint8 `[8]`, lowest first."""
    with torch.inference_mode(False):  # they outlive the call that asks first
        return torch.tensor([2**i for i in range(8)], dtype=torch.uint8, device=device)


def bits_to_bool(bits: torch.Tensor) -> torch.Tensor:
    """Convert uint8 `[..., n]` to bool `[..., 8 n]`, lowest bit first."""
    return ((bits[..., None] & _weights(bits.device)) != 0).flatten(-2)


def bool_to_bits(flags: torch.Tensor) -> torch.Tensor:
    """Convert bool `[..., 8 n]` to uint8 `[..., n]`, lowest bit first: True, False, True and five False give 5."""
    return (flags.unflatten(-1, (-1, 8)) * _weights(flags.device)).sum(-1, dtype=torch.uint8)


class _Places(NamedTuple):
    """Where each token of an open span is, all `[B, n]`.

    Attributes:
        pos: row position.
        slot: slot in the arenas.
        fresh: index among the call's new tokens, for a new token.
        old: bool, open before the call.
        new: bool, new in this call. Tokens past the row's end are neither.
    """

    pos: torch.Tensor
    slot: torch.Tensor
    fresh: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor


def _places(state: State, window: Window, tokens: int, count: torch.Tensor) -> _Places:
    """Return the places of the open span of a call of `tokens` columns, `count` `[B]` of them real."""
    flat = torch.arange(open_span_blocks(window, tokens) * window.block, device=count.device)
    pos = state["open_start"][:, None] + flat
    fresh = pos - state["length"][:, None]
    slot = (state["closed"] * window.block)[:, None] + flat
    slots = state["block_len"].shape[1] * window.block
    new = (fresh >= 0) & (fresh < count[:, None])
    return _Places(pos, slot.clamp(max=slots - 1), fresh.clamp(0, tokens - 1), fresh < 0, new)


def _open_tokens(fmt: Format, side: State, at: _Places, blocks: int) -> Operand:
    """Return the open tokens `[B, H, n, D]` of one side.

    They are in the ring at their row position modulo its size, or without a ring in the arena at their slot."""
    if fmt.windowed:
        return fmt.ring(side).map(lambda x: pick(x, at.pos % x.shape[2]))
    return fmt.read(side, blocks).map(lambda x: pick(x.flatten(2, 3), at.slot))


def _join(before: Operand, arrived: Operand, at: _Places) -> Operand:
    """Return the tokens of an open span `[B, H, n, D]`: open tokens `before`, then new tokens `arrived` `[B, H, T, D]`.

    Zeros past the row's end."""

    def join(older: torch.Tensor, newer: torch.Tensor) -> torch.Tensor:
        there = torch.where(at.new[:, None, :, None], pick(newer, at.fresh), older)
        return torch.where((at.old | at.new)[:, None, :, None], there, 0)

    scale = None if arrived.scale is None else join(before.scales[..., None], arrived.scale[..., None])[..., 0]
    return Operand(join(before.x, arrived.x), scale)


def build_open_span(state: State, spec: LayerSpec, k: torch.Tensor, v: torch.Tensor, count: torch.Tensor) -> OpenSpan:
    """Return the open span of a call from `k`, `v` `[B, H, T, D]`, real tokens first, and `count` `[B]`.

    Tokens with a non-finite key or value become zeros, are masked, and are counted in the state (`nonfinite`). Formats
    may fix scales of the row here (`Format.quantize_tokens`). The rest of the state stays unchanged."""
    window, tokens, length = spec.window, k.shape[2], state["length"]
    at = _places(state, window, tokens, count)
    real = torch.arange(tokens, device=k.device) < count[:, None]
    bad = ~(k.isfinite().all(-1) & v.isfinite().all(-1)) & real[:, None]
    state["nonfinite"].add_(bad.sum(-1))

    sides = []
    for name, fmt, x in (("k", spec.k, k), ("v", spec.v, v)):
        side = side_of(state, name)
        clean = torch.where((real[:, None] & ~bad)[..., None], x.float(), 0.0)
        arrived = fmt.quantize_tokens(Arrival(clean, real, length, count, window.block), side)
        joined = _join(_open_tokens(fmt, side, at, state["block_len"].shape[1]), arrived, at)
        sides.append(joined.map(lambda x: x.unflatten(2, (-1, window.block))))

    dropped = pick(bits_to_bool(state["dropped"]).flatten(2)[..., None], at.slot)[..., 0]
    masked = torch.where(at.new[:, None], pick(bad[..., None], at.fresh)[..., 0], dropped & at.old[:, None])
    valid = (at.old | at.new).unflatten(1, (-1, window.block))
    keep = valid[:, None] & ~masked.unflatten(2, (-1, window.block))
    ready = (length + count - state["open_start"] - window.residual).clamp(min=0)
    closing = ready // window.span * (window.span // window.block)
    pos = at.pos.unflatten(1, (-1, window.block))
    return OpenSpan(pos, valid, keep, sides[0], sides[1], state["closed"].clone(), closing, torch.zeros_like(keep))
