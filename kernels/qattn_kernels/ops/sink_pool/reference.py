"""SinkQ's pool in plain PyTorch: the specification.

SinkQ section 3: the tokens with the smallest keys leave their block, and the mean of the block's other keys replaces
them. Here the block keeps the tokens' codes and nothing is replaced. A key excluded from the block's scales leaves the
same scales as that mean would, and its codes are not read while it is away.

A token that returns finds its codes in the block, clamped to the block's scales, as a write would store them. Values
stay included in their block's scales. Values of true sinks are small, but a token that was only the smallest of its
block may have any value."""

from __future__ import annotations

import torch

from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import State
from qattn_kernels.ops.sink_pool.mass import mass
from qattn_kernels.ops.sink_pool.table import FIELDS, at_slots, blank, flip, read_sinks
from qattn_kernels.reference.rows import OpenSpan, pick_each
from qattn_kernels.reference.tiles import FOREVER, Tiles


def compete(state: State, spec: LayerSpec, open_span: OpenSpan) -> OpenSpan:
    """Let the pool compete, in order, with each block that a call closes. Returns the open span with `chosen` set.

    Changes the table and the sinks' tensors in place. `settle` updates the bits of `dropped` at the end of the call."""
    pool, table = spec.sink_pool, side_of(state, "sink")
    norms, chosen = _norms(state, spec, open_span), torch.zeros_like(open_span.keep)
    first = (state["length"] == 0)[:, None] & (pool.prefill == "whole")
    known = open_span.closing.device.type == "cpu"  # the host can look at values without waiting
    for j in range(int(open_span.closing.max()) if known else chosen.shape[2]):
        closes, count = (j < open_span.closing)[:, None], (open_span.closed + j + 1)[:, None]
        _forget(state, table, closes, count - pool.crop_blocks(spec.window), open_span.closed, known)
        for _ in range(pool.num):
            best, t = norms[:, :, j].min(-1)
            t = (norms[:, :, j] == best[..., None]).int().argmax(-1)  # ties go to the oldest
            takes = _take(table, pool.num, closes, count, best, first)
            if known and not takes.any():
                break  # nor would the block's other tokens enter
            pos, slot = open_span.pos[:, j].gather(1, t), (open_span.closed[:, None] + j) * spec.window.block + t
            _insert(table, takes, {"pos": pos, "slot": slot, "born": count, "norm": best})
            at = torch.nn.functional.one_hot(t, norms.shape[-1]).bool() & takes[..., None]
            norms[:, :, j].masked_fill_(at, torch.inf)
            chosen[:, :, j] |= at
        for _ in range(pool.num):
            if not _write_back(table, pool.window, closes, count, known):
                break
    if pool.prefill == "whole":
        stayed = at_slots((table["born"] > 0) & first[..., None], table["slot"], chosen.shape[2:].numel())
        chosen = torch.where(first[..., None, None], stayed.view_as(chosen), chosen)
    _fill(state, spec, open_span)
    return open_span._replace(chosen=chosen)


def _norms(state: State, spec: LayerSpec, open_span: OpenSpan) -> torch.Tensor:
    """Return fp64 `[B, H, n, block]`, the measure that tokens compete by: the smallest wins. Infinity for masked
    tokens."""
    pool = spec.sink_pool
    if pool.select == "attention":
        norm = -mass(state, spec.window, open_span)
    elif pool.select == "random":
        heads = torch.arange(open_span.keep.shape[1], device=open_span.pos.device)[:, None, None]
        norm = (torch.sin(open_span.pos[:, None] * 12.9898 + heads.double() * 78.233) * 43758.5453).frac().abs()
    else:
        norm = open_span.k.x.double().abs().sum(-1)
        norm = norm if open_span.k.scale is None else norm * open_span.k.scale.double()
    return torch.where(open_span.keep, -norm if pool.select == "largest_key" else norm, torch.inf)


def _forget(
    state: State, table: State, closes: torch.Tensor, until: torch.Tensor, closed: torch.Tensor, known: bool
) -> None:
    """Free the entries written back at close number `until` `[B, 1]` or before, which no crop can restore.

    Only in rows where `closes` `[B, 1]`. `closed` `[B]`: closed blocks before the call. `known`: the host may look at
    values."""
    written, born = table["written"], table["born"]
    gone = (written > 0) & (written <= until[..., None]) & closes[..., None]
    if known and not gone.any():
        return
    before = closed[:, None, None]
    unsettled = gone & (written > before) & (born <= before)
    flips = at_slots(unsettled, table["slot"], state["dropped"].shape[2:].numel() * 8)
    flip(state, flips)
    for name in FIELDS:
        table[name].masked_fill_(gone, 0)


def _take(
    table: State, num: int, closes: torch.Tensor, count: torch.Tensor, best: torch.Tensor, first: torch.Tensor
) -> torch.Tensor:
    """Return bool `[B, H]`: whether `best` `[B, H]` enters the pool. A full pool evicts its worst key; ties go to the
    youngest."""
    inside = (table["born"] > 0) & (table["evicted"] == 0)
    full = inside.sum(-1) >= num
    norm = torch.where(inside, table["norm"], -torch.inf)
    worst = norm.amax(-1)
    takes = closes & best.isfinite() & (~full | (best < worst))
    last = torch.where(inside & (norm == worst[..., None]), table["pos"], -1).argmax(-1)
    goes = torch.nn.functional.one_hot(last, norm.shape[-1]).bool() & (takes & full)[..., None]
    table["evicted"].copy_(torch.where(goes & ~first[..., None], count[..., None].int(), table["evicted"]))
    for name in FIELDS:
        table[name].masked_fill_(goes & first[..., None], 0)
    return takes


def _insert(table: State, takes: torch.Tensor, entry: dict[str, torch.Tensor]) -> None:
    """Insert an entry `{name: [B, H]}` at the first free place of each row and head where `takes` is true."""
    free = (table["born"] == 0).int().argmax(-1)
    at = torch.nn.functional.one_hot(free, table["born"].shape[-1]).bool() & takes[..., None]
    for name, value in entry.items():
        table[name].copy_(torch.where(at, value[..., None].to(table[name].dtype), table[name]))


def _write_back(table: State, window: int, closes: torch.Tensor, count: torch.Tensor, known: bool) -> bool:
    """If more than `window` entries are evicted, mark the first evicted as written back; ties go to the oldest
    token. Returns false if `known` and no row has more."""
    waiting = (table["evicted"] > 0) & (table["written"] == 0)
    over = closes & (waiting.sum(-1) > window)
    if known and not over.any():
        return False
    age = table["evicted"].long() * 2**32 + table["pos"]
    oldest = torch.where(waiting, age, 2**63 - 1).argmin(-1)
    at = torch.nn.functional.one_hot(oldest, age.shape[-1]).bool() & over[..., None]
    table["written"].copy_(torch.where(at, count[..., None].int(), table["written"]))
    return True


def _fill(state: State, spec: LayerSpec, open_span: OpenSpan) -> None:
    """Copy the tokens of the call's new entries from the open span; free places get zeros."""
    table, first = side_of(state, "sink"), (open_span.closed * spec.window.block)[:, None, None]
    new = table["born"] > open_span.closed[:, None, None]
    index = (table["slot"] - first).clamp(0, open_span.keep.shape[2:].numel() - 1)
    for name, fmt, tokens in (("k", spec.k, open_span.k), ("v", spec.v, open_span.v)):
        sinks = read_sinks(side_of(state, name), fmt)
        found = tokens.map(lambda x: pick_each(x.flatten(2, 3), index))
        sinks.x.copy_(torch.where(new[..., None], found.x, sinks.x))
        if sinks.scale is not None:
            sinks.scale.copy_(torch.where(new, found.scales, sinks.scale))
        blank(sinks, table["born"] == 0)


def sink_tiles(state: State, spec: LayerSpec, closed: torch.Tensor, since: torch.Tensor | None) -> Tiles:
    """Return the sinks as tiles, with tokens in table order.

    A long call asks before the pool competes (`since=None`) and sees the table as it is. A short call asks afterwards,
    and each query sees what single steps would show it. Block `closed + j` counts as closed from row position
    `since[b, j]` on."""
    table, block = side_of(state, "sink"), spec.window.block
    start, end = torch.zeros_like(table["pos"]), torch.where(table["written"] > 0, -1, FOREVER).int()
    if since is not None:
        start = when(table["born"], closed, since)
        end = torch.where(table["written"] > 0, when(table["written"], closed, since) - 1, FOREVER).int()
    start = torch.where(table["born"] > 0, start, FOREVER).int()

    def tiles(x: torch.Tensor) -> torch.Tensor:
        pad = x.new_zeros(*x.shape[:2], -x.shape[2] % block, *x.shape[3:])
        return torch.cat([x, pad], 2).unflatten(2, (-1, block))

    k, v = (read_sinks(side_of(state, name), fmt).map(tiles) for name, fmt in (("k", spec.k), ("v", spec.v)))
    return Tiles(k, v, tiles(table["pos"]), tiles(start), tiles(end), tiles(table["born"] > 0))


def packed_copies(tiles: Tiles, state: State, closed: torch.Tensor, since: torch.Tensor) -> Tiles:
    """Return the packed tiles of a short call, after the pool competed. Sets since when queries read a moved token's
    codes in its block."""
    table, shape = side_of(state, "sink"), tiles.keep.shape
    slots = shape[2] * shape[3]
    new = torch.maximum(table["born"], table["written"]) > closed[:, None, None]
    start = torch.where(table["written"] > 0, when(table["written"], closed, since), FOREVER)
    later = torch.zeros(*shape[:2], slots + 1, dtype=torch.int32, device=start.device)
    later.scatter_(2, torch.where(new, table["slot"], slots).long(), start.int())
    later, mine = later[..., :slots].view(shape), at_slots(new, table["slot"], slots).view(shape)
    return tiles._replace(since=torch.maximum(tiles.since, later), keep=tiles.keep | mine)


def when(times: torch.Tensor, closed: torch.Tensor, since: torch.Tensor) -> torch.Tensor:
    """Return the row position from which a query sees an event at the close of block number `times` `[B, H, n]`.

    The first block is 1. Returns 0 if the event was before the call."""
    j = times - 1 - closed[:, None, None]
    late = since[:, None].expand(-1, j.shape[1], -1).gather(2, j.clamp(0, since.shape[1] - 1).long())
    return torch.where(j >= 0, late, 0)
