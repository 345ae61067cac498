"""Give the ring of open tokens another size."""

from __future__ import annotations

import torch

from qattn_kernels.layout import State
from qattn_kernels.rows import pick
from qattn_kernels.sink_pool.table import FIELDS, read_sinks
from qattn_kernels.spec import LayerSpec
from qattn_kernels.state import side_of
from qattn_kernels.stores import Operand, Store


def resize_ring(state: State, old: LayerSpec, new: LayerSpec) -> None:
    """Replace the rings of `state`, and what its sink pool keeps for roll-backs, by those of `new`, whose window is
    larger, keeping every token they hold."""
    before, after = old.window.ring, new.window.ring
    last = state["length"][:, None] - 1
    pos = last - (last - torch.arange(after, device=last.device)) % after
    held = (pos >= 0) & (pos >= state["longest"][:, None] - before)
    pool = new.sink_pool
    more = pool.entries(new.window) - pool.entries(old.window)
    for side, store in (("k", old.k), ("v", old.v)):
        if not store.windowed:
            continue
        kept = store.ring(side_of(state, side)).map(
            lambda x: torch.where(held[:, None, :, None], pick(x, pos % before), 0)
        )
        _replace(state, f"{side}.ring", store, kept)
        if pool.num:
            sinks = read_sinks(side_of(state, side), store).map(lambda x: torch.nn.functional.pad(x, (0, 0, 0, more)))
            _replace(state, f"{side}.sink", store, sinks)
    if pool.num:
        if pool.select == "attention":
            state["mass.ring"] = torch.where(held[:, None, :, None], pick(state["mass.ring"], pos % before), 0)
        for name in FIELDS:
            state[f"sink.{name}"] = torch.nn.functional.pad(state[f"sink.{name}"], (0, more))
    state["ring_from"].copy_(torch.maximum(state["ring_from"], state["longest"] - before).int())


def _replace(state: State, name: str, store: Store, tokens: Operand) -> None:
    state[name] = tokens.x.transpose(-1, -2).contiguous() if store.transposed else tokens.x
    if tokens.scale is not None:
        state[f"{name}_scale"] = tokens.scale
