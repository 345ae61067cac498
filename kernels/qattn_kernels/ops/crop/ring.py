"""Resize the ring of open tokens."""

from __future__ import annotations

import torch

from qattn_kernels.formats import Format, Operand
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import State
from qattn_kernels.ops.sink_pool.table import FIELDS, read_sinks
from qattn_kernels.reference.rows import pick


def resized_ring(state: State, old: LayerSpec, new: LayerSpec) -> State:
    """Return the rings of `state`, and what its sink pool keeps for crops, in the sizes of `new`, a larger window.

    Every token keeps its row position. `state` stays as it is; the result has the tensors that change.
    """
    before, after = old.window.ring, new.window.ring
    last = state["length"][:, None] - 1
    pos = last - (last - torch.arange(after, device=last.device)) % after
    held = (pos >= 0) & (pos >= state["longest"][:, None] - before)
    pool = new.sink_pool
    more = pool.entries(new.window) - pool.entries(old.window)
    made: State = {}
    for side, fmt in (("k", old.k), ("v", old.v)):
        if not fmt.windowed:
            continue
        kept = fmt.ring(side_of(state, side)).map(
            lambda x: torch.where(held[:, None, :, None], pick(x, pos % before), 0)
        )
        made |= _named(f"{side}.ring", fmt, kept)
        if pool.num:
            sinks = read_sinks(side_of(state, side), fmt).map(lambda x: torch.nn.functional.pad(x, (0, 0, 0, more)))
            made |= _named(f"{side}.sink", fmt, sinks)
    if pool.num:
        if pool.select == "attention":
            made["mass.ring"] = torch.where(held[:, None, :, None], pick(state["mass.ring"], pos % before), 0)
        made |= {f"sink.{name}": torch.nn.functional.pad(state[f"sink.{name}"], (0, more)) for name in FIELDS}
    made["ring_from"] = torch.maximum(state["ring_from"], state["longest"] - before).int()
    return made


def _named(name: str, fmt: Format, tokens: Operand) -> State:
    made = {name: tokens.x.transpose(-1, -2).contiguous() if fmt.transposed else tokens.x}
    return made if tokens.scale is None else {**made, f"{name}_scale": tokens.scale}
