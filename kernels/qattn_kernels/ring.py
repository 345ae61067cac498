"""Give the ring of open tokens another size."""

from __future__ import annotations

import torch

from qattn_kernels.layout import State
from qattn_kernels.rows import pick
from qattn_kernels.spec import LayerSpec
from qattn_kernels.state import side_of


def resize_ring(state: State, old: LayerSpec, new: LayerSpec) -> None:
    """Replace the rings of `state` by those of `new`, whose window is larger, keeping every token they hold."""
    before, after = old.window.ring, new.window.ring
    last = state["length"][:, None] - 1
    pos = last - (last - torch.arange(after, device=last.device)) % after
    held = (pos >= 0) & (pos >= state["longest"][:, None] - before)
    for side, store in (("k", old.k), ("v", old.v)):
        if not store.windowed:
            continue
        kept = store.ring(side_of(state, side)).map(
            lambda x: torch.where(held[:, None, :, None], pick(x, pos % before), 0)
        )
        state[f"{side}.ring"] = kept.x.transpose(-1, -2).contiguous() if store.transposed else kept.x
        if kept.scale is not None:
            state[f"{side}.ring_scale"] = kept.scale
    state["ring_from"].copy_(torch.maximum(state["ring_from"], state["longest"] - before).int())
