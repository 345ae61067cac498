"""Read the tokens of a layer, and write some of them to an empty layer.

A kept token is quantized again, from the numbers that attention reads: with the tokens that are its neighbours now.
A format with one scale per token finds the same codes. Formats whose tokens share scales round a second time."""

from __future__ import annotations

from typing import NamedTuple

import torch

from qattn_kernels.layer.skip_counts import skip_count_tensors
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import Geometry, State
from qattn_kernels.ops.append.reference import append
from qattn_kernels.ops.repack.reference import in_pool
from qattn_kernels.ops.sink_pool.reference import compete
from qattn_kernels.ops.sink_pool.table import read_sinks, settle
from qattn_kernels.reference.rows import build_open_span, pick_each
from qattn_kernels.reference.tiles import packed_tiles


class Stored(NamedTuple):
    """Slots of every row, packed ones first, in the order of their tokens.

    Attributes:
        k, v: fp32 `[B, Hkv, n, D]`, dequantized, and rotated if the layer rotates.
        pos: `[B, n]`, row positions.
        real: bool `[B, Hkv, n]`, false for a slot without a token and for a token that was not finite.
    """

    k: torch.Tensor
    v: torch.Tensor
    pos: torch.Tensor
    real: torch.Tensor


class Kept(NamedTuple):
    """Kept tokens of every row and head, in order.

    Attributes:
        k, v: fp32 `[B, Hkv, n, D]`, NaN where a head keeps fewer tokens than another one.
        tokens: `[B]`, tokens of the head that keeps most.
    """

    k: torch.Tensor
    v: torch.Tensor
    tokens: torch.Tensor


def stored_tokens(state: State, geo: Geometry, spec: LayerSpec) -> Stored:
    """Return the tokens of a layer without a window: blocks, sinks, then open tokens."""
    packed, nothing = packed_tiles(state, spec, state["closed"]), torch.zeros_like(state["length"])
    k, v = (torch.zeros(geo.batch, geo.heads, 1, dim, device=nothing.device) for dim in (geo.k_dim, geo.v_dim))
    opened = build_open_span(state, spec, k, v, nothing)  # the open span of a call without tokens
    numbers = [x.dequantize().flatten(2, 3) for x in (packed.k, packed.v)]
    keep = packed.keep
    if spec.sink_pool.num:
        keep = keep | in_pool(state, keep)
        numbers = [_with_sinks(x, state, spec, side) for x, side in zip(numbers, "kv", strict=True)]
    k, v = (torch.cat([x, y.dequantize().flatten(2, 3)], 2) for x, y in zip(numbers, (opened.k, opened.v), strict=True))
    pos = torch.cat([packed.pos[:, 0].flatten(1), opened.pos.flatten(1)], 1)
    real = torch.cat([(keep & (packed.since == 0)).flatten(2), opened.keep.flatten(2)], 2)
    return Stored(k, v, pos, real)


def _with_sinks(x: torch.Tensor, state: State, spec: LayerSpec, side: str) -> torch.Tensor:
    """Return packed tokens `[B, Hkv, n, D]` of one side, with the unquantized numbers of sinks that are out of their
    blocks."""
    table = side_of(state, "sink")
    sinks = read_sinks(side_of(state, side), spec.k if side == "k" else spec.v).dequantize()
    inside = (table["born"] > 0) & (table["written"] == 0)
    slot = torch.where(inside, table["slot"], x.shape[2]).long()  # others: a slot at the end
    padded = torch.nn.functional.pad(x, (0, 0, 0, 1))
    return padded.scatter(2, slot[..., None].expand_as(sinks), sinks)[:, :, :-1]


def kept_tokens(stored: Stored, keep: torch.Tensor) -> Kept:
    """Return the tokens to keep. `keep` bool `[B, Hkv, positions]`: by row position."""
    at = stored.pos.clamp(0, keep.shape[2] - 1).long()[:, None].expand_as(stored.real)
    picked = stored.real & keep.gather(2, at)
    count = picked.sum(-1)
    most = int(count.max())
    order = picked.int().argsort(dim=-1, descending=True, stable=True)[..., :most]
    there = (torch.arange(most, device=count.device) < count[..., None])[..., None]
    k, v = (pick_each(x, order).masked_fill(~there, torch.nan) for x in (stored.k, stored.v))
    return Kept(k, v, count.amax(1))


def write_kept(state: State, geo: Geometry, spec: LayerSpec, kept: Kept, before: State) -> None:
    """Write the kept tokens into an empty layer with room for them.

    Row positions count the kept tokens alone. Columns still count all tokens of `before`, the layer from which the
    tokens come, and none of them can be cropped."""
    span = torch.stack([torch.zeros_like(kept.tokens), kept.tokens], 1).int()
    opened = build_open_span(state, spec, kept.k, kept.v, span[:, 1])  # masks NaN
    if spec.sink_pool.num:
        opened = compete(state, spec, opened)
    append(state, spec, opened, span, kept.k.shape[2])
    if spec.sink_pool.num:
        settle(state, opened.closed)
    counters = skip_count_tensors(geo) if spec.sparsity.tau > 0 else ()
    for name in ("columns_seen", "nonfinite", *counters):
        state[name].copy_(before[name])
    state["padded"].copy_(before["columns_seen"])
