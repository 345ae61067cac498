"""Append and close in plain PyTorch: the specification."""

from __future__ import annotations

from functools import partial

import torch

from qattn_kernels.formats import Block, Operand
from qattn_kernels.formats.base import write_rows
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import State
from qattn_kernels.reference.rows import Region, bool_to_bits, padding_end, pick


def append(state: State, spec: LayerSpec, region: Region, span: torch.Tensor, columns: int) -> None:
    """Write the region of a call into the state, in place.

    Args:
        state: the layer's tensors.
        spec: the layer's formats.
        region: open and new tokens (`build_region`).
        span: int32 `[B, 2]`, first real new column and count of real new tokens.
        columns: new columns, padding included.
    """
    count, padding = span[:, 1], padding_end(span, columns)
    capacity = state["block_len"].shape[1]
    k_keep = region.keep & ~region.chosen if spec.sink_pool.exclude else region.keep
    for j in range(region.pos.shape[1]):
        index = (region.closed + j).clamp(max=capacity - 1).long()
        closes, reached = j < region.closing, region.valid[:, j, 0]
        write_rows(state["dropped"], index, reached, bool_to_bits(region.valid[:, None, j] & ~region.keep[:, :, j]))
        for side, fmt, tokens, keep in (("k", spec.k, region.k, k_keep), ("v", spec.v, region.v, region.keep)):
            block = tokens.map(partial(torch.select, dim=2, index=j))
            where = closes if fmt.windowed else reached
            fmt.write(side_of(state, side), Block(block, keep[:, :, j], index, where))
        for name, value in (("block_pos", region.pos[:, j, 0]), ("block_len", closes.int() * spec.window.block)):
            write_rows(state[name][:, None], index, closes, value[:, None])
    length = state["length"] + count
    for side, fmt, tokens in (("k", spec.k, region.k), ("v", spec.v, region.v)):
        if fmt.windowed:
            _fill_ring(fmt.ring(side_of(state, side)), tokens, state, length)
    if region.given is not None:
        _fill_ring(Operand(state["mass.ring"], None), Operand(region.given, None), state, length)
    state["length"].copy_(length)
    state["longest"].copy_(torch.maximum(state["longest"], length))
    state["closed"].add_(region.closing)
    state["open_start"].add_(region.closing * spec.window.block)
    state["padded"].copy_(torch.where(padding > 0, state["seen"] + padding, state["padded"]))
    state["seen"].add_(columns)


def _fill_ring(ring: Operand, tokens: Operand, state: State, length: torch.Tensor) -> None:
    """Each slot takes the newest token whose row position falls on it, if that token is new."""
    slots = ring.x.shape[2]
    last = length[:, None] - 1
    pos = last - (last - torch.arange(slots, device=last.device)) % slots
    new = (pos >= state["length"][:, None])[:, None]
    index = (pos - state["open_start"][:, None]).clamp(0, tokens.x.shape[2] * tokens.x.shape[3] - 1)
    newest = tokens.map(lambda x: pick(x.flatten(2, 3), index))
    ring.x.copy_(torch.where(new[..., None], newest.x, ring.x))
    if newest.scale is not None:
        ring.scales.copy_(torch.where(new, newest.scale, ring.scales))
