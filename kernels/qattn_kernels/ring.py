"""Give the ring of open tokens another size."""

from __future__ import annotations

import torch

from qattn_kernels.layout import State
from qattn_kernels.spec import LayerSpec


def resize_ring(state: State, old: LayerSpec, new: LayerSpec) -> None:
    """Replace the rings of `state` by those of `new`, whose window is larger, keeping every token they hold."""
    before, after = old.window.ring, new.window.ring
    last = state["length"][:, None] - 1
    pos = last - (last - torch.arange(after, device=last.device)) % after
    held = (pos >= 0) & (pos >= state["longest"][:, None] - before)
    for side, store in (("k", old.k), ("v", old.v)):
        for name in ("ring", "ring_scale"):
            ring = state.get(f"{side}.{name}")
            if not store.windowed or ring is None:
                continue
            shape = (1, 1) if ring.dim() == 4 else (1,)
            index = (pos % before).long().view(len(pos), 1, -1, *shape[1:])
            index = index.expand(-1, ring.shape[1], -1, *ring.shape[3:])
            mask = held.view(len(pos), 1, -1, *shape[1:])
            state[f"{side}.{name}"] = torch.where(
                mask, ring.gather(2, index), torch.zeros((), dtype=ring.dtype, device=ring.device)
            )
    state["ring_from"].copy_(torch.maximum(state["ring_from"], state["longest"] - before).int())
