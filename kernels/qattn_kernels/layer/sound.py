"""Validate the numbers of a layer's state. Kernels index memory with them unchecked."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from qattn_kernels.formats.traits import mixed_heads
from qattn_kernels.layer.arena import Layout
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import Geometry, State

MOST_COLUMNS = 2**30  # row positions are int32, and kernels add the tokens of a call


def unsound(state: State, layout: Layout, columns: int) -> str | None:
    """Return which number of a state cannot come from calls of `columns` columns in total, or None.

    Codes, scales, token masks and statistics pass unchecked: any bits are valid, and none of them is an index.

    Args:
        state: the layer's tensors on a CPU, with any content.
        layout: sizes and formats of the tensors.
        columns: columns of all calls, padding included.
    """
    return next((said for said, wrong in _faults(state, *layout, columns) if wrong), None)


def slots_used(state: State, block: int) -> int:
    """Return the slots that the fullest row uses, including unused slots of short blocks."""
    return int((state["closed"] * block + state["length"] - state["open_start"]).max())


def _faults(state: State, geo: Geometry, spec: LayerSpec, columns: int) -> Iterator[tuple[str, bool]]:
    length, closed, start = (state[name].long() for name in ("length", "closed", "open_start"))
    block, window = spec.window.block, spec.window
    yield f"it has {int(state['columns_seen'])} columns in place of {columns}", int(state["columns_seen"]) != columns
    yield f"{columns} columns are more than {MOST_COLUMNS}", columns > MOST_COLUMNS
    yield f"padding ends at column {int(state['padded'])}", not 0 <= int(state["padded"]) <= columns
    yield "a row is longer than the columns", not within(length, 0, columns)
    yield "a row lost tokens because the layer was full", bool(state["overflow"].any())
    yield f"a row has other blocks than 0 to {geo.blocks}", not within(closed, 0, geo.blocks)
    yield "open tokens begin outside of their row", not (within(start, 0, columns) and bool((start <= length).all()))
    n_open = length - start
    yield "more tokens are open than a row can have", not within(n_open, 0, window.span + window.residual)
    yield "open tokens have no room", not within(closed * block + n_open, 0, geo.blocks * block)
    yield "a run of full blocks begins outside of the packed tokens", not _between(state["origin"], start)
    yield "the ring holds tokens that the row does not have", not _between(state["ring_from"], length)
    longest = state["longest"].long()
    yield (
        "a row is longer than it ever was",
        not (within(longest, 0, MOST_COLUMNS) and bool((longest >= length).all())),
    )
    yield "packed blocks do not follow one another", not _in_order(state, closed, start, block)
    for side, fmt in (("k", spec.k), ("v", spec.v)):
        mixed = mixed_heads(fmt)
        known = mixed is None or mixed.places_known(side_of(state, side), closed)
        yield f"{side}: codes of a head have no place", not known
    if spec.sink_pool.num:
        yield "a sink is where no token is", not _sinks_there(side_of(state, "sink"), length, closed, block)


def within(x: torch.Tensor, low: int, high: int) -> bool:
    """Return whether all numbers are from `low` to `high`."""
    return bool(((x >= low) & (x <= high)).all())


def _between(x: torch.Tensor, high: torch.Tensor) -> bool:
    return bool(((x >= 0) & (x <= high)).all())


def _in_order(state: State, closed: torch.Tensor, start: torch.Tensor, block: int) -> bool:
    """Return whether every closed block has tokens and starts at the end of its predecessor, and the last ends at
    `start`."""
    pos, size = state["block_pos"].long(), state["block_len"].long()
    is_closed = torch.arange(pos.shape[1], device=pos.device) < closed[:, None]
    after = torch.cat([pos[:, 1:], pos.new_zeros(len(pos), 1)], 1)
    after = torch.where(torch.arange(pos.shape[1], device=pos.device) == closed[:, None] - 1, start[:, None], after)
    follows = (pos >= 0) & (size >= 1) & (size <= block) & (pos + size == after)
    return bool(torch.where(is_closed, follows, (pos == 0) & (size == 0)).all()) and not bool(start[closed == 0].any())


def _sinks_there(table: State, length: torch.Tensor, closed: torch.Tensor, block: int) -> bool:
    """Return whether each entry of the sink table is a token of a closed block, and free entries are zeros."""
    born, pos, slot = (table[name].long() for name in ("born", "pos", "slot"))
    most, taken = closed[:, None, None], born > 0
    times = all(_between(table[name], most) for name in ("born", "evicted", "written"))
    there = (pos >= 0) & (pos < length[:, None, None]) & (slot >= 0) & (slot < most * block)
    return times and bool(torch.where(taken, there, (pos == 0) & (slot == 0)).all())
