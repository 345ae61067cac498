"""Append and close in plain PyTorch: the specification."""

from __future__ import annotations

from functools import partial

import torch

from qattn_kernels.formats import Block, Operand
from qattn_kernels.formats.base import write_rows
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import State
from qattn_kernels.reference.rows import OpenSpan, bool_to_bits, padding_end, pick


def append(state: State, spec: LayerSpec, open_span: OpenSpan, span: torch.Tensor, columns: int) -> None:
    """Write the open span of a call into the state, in place.

    Args:
        state: the layer's tensors.
        spec: the layer's formats.
        open_span: open and new tokens (`build_open_span`).
        span: int32 `[B, 2]`, first real new column and count of real new tokens.
        columns: new columns, padding included.
    """
    count, padding = span[:, 1], padding_end(span, columns)
    capacity = state["block_len"].shape[1]
    k_keep = open_span.keep & ~open_span.chosen if spec.sink_pool.exclude else open_span.keep
    known = count.device.type == "cpu"  # the host can look at values without waiting
    for j in range(open_span.pos.shape[1]):
        closes, reached = j < open_span.closing, open_span.valid[:, j, 0]
        if known and not reached.any():  # nor any later block
            break
        index = (open_span.closed + j).clamp(max=capacity - 1).long()
        write_rows(
            state["dropped"], index, reached, bool_to_bits(open_span.valid[:, None, j] & ~open_span.keep[:, :, j])
        )
        for side, fmt, tokens, keep in (("k", spec.k, open_span.k, k_keep), ("v", spec.v, open_span.v, open_span.keep)):
            block = tokens.map(partial(torch.select, dim=2, index=j))
            where = closes if fmt.windowed else reached
            if not known or where.any():
                fmt.write(side_of(state, side), Block(block, keep[:, :, j], index, where))
        for name, value in (("block_pos", open_span.pos[:, j, 0]), ("block_len", closes.int() * spec.window.block)):
            write_rows(state[name][:, None], index, closes, value[:, None])
    length = state["length"] + count
    for side, fmt, tokens in (("k", spec.k, open_span.k), ("v", spec.v, open_span.v)):
        if fmt.windowed:
            _fill_ring(fmt.ring(side_of(state, side)), tokens, state, length)
    if open_span.given is not None:
        _fill_ring(Operand(state["mass.ring"], None), Operand(open_span.given, None), state, length)
    state["length"].copy_(length)
    state["longest"].copy_(torch.maximum(state["longest"], length))
    state["closed"].add_(open_span.closing)
    state["open_start"].add_(open_span.closing * spec.window.block)
    state["padded"].copy_(torch.where(padding > 0, state["columns_seen"] + padding, state["padded"]))
    state["columns_seen"].add_(columns)


def _fill_ring(ring: Operand, tokens: Operand, state: State, length: torch.Tensor) -> None:
    """Write each slot's newest token: the last token whose row position maps to the slot, if that token is new."""
    slots = ring.x.shape[2]
    last = length[:, None] - 1
    pos = last - (last - torch.arange(slots, device=last.device)) % slots
    new = (pos >= state["length"][:, None])[:, None]
    index = (pos - state["open_start"][:, None]).clamp(0, tokens.x.shape[2] * tokens.x.shape[3] - 1)
    newest = tokens.map(lambda x: pick(x.flatten(2, 3), index))
    ring.x.copy_(torch.where(new[..., None], newest.x, ring.x))
    if newest.scale is not None:
        ring.scales.copy_(torch.where(new, newest.scale, ring.scales))
