"""Take tokens back from the end of every row."""

from __future__ import annotations

import torch

from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import State
from qattn_kernels.ops.sink_pool.table import roll_back
from qattn_kernels.reference.rows import bits_to_bool, bool_to_bits


def crop(state: State, spec: LayerSpec, drop: int) -> None:
    """Remove the last `drop` tokens of every row, in place; the caller has checked that no padding is among them.

    Within the horizon of the longest length a row had, blocks that lost tokens are reopened: the ring still holds
    them, and the row is as if it had never seen what was taken. Farther back survivors keep their codes, dead slots
    are masked by `block_len`, and the next token opens a new block. Formats that write each token in its final form
    can always reopen.
    """
    window = spec.window
    length = (state["length"] - drop).clamp(min=0)
    units = (length - state["origin"] - window.residual).clamp(min=0) // window.span
    reopened = state["origin"] + units * window.span
    near = (
        (length >= state["longest"] - window.horizon) & (length >= state["origin"]) & (reopened >= state["ring_from"])
    )
    if not (spec.k.windowed or spec.v.windowed):
        near = torch.ones_like(near)
    cut = ~near & (length < state["open_start"])  # far, and packed tokens go: the last block may become a short one

    blocks = torch.arange(state["block_len"].shape[1], device=length.device)
    left = (length[:, None] - state["block_pos"]).clamp(min=0).minimum(state["block_len"])
    start = torch.where(near, reopened, torch.where(cut, length, state["open_start"]))
    closed = state["closed"] - (state["open_start"] - start) // window.block
    closed = torch.where(cut, (left > 0).sum(1), closed).int()
    alive = blocks < closed[:, None]
    state["block_len"].copy_(torch.where(alive, left, 0))
    state["block_pos"].masked_fill_(~alive, 0)
    for name in ("origin", "longest", "ring_from"):
        state[name].copy_(torch.where(cut, length, state[name]))
    state["length"].copy_(length)
    state["open_start"].copy_(start)
    state["closed"].copy_(closed)
    state["columns_seen"].sub_(drop)
    _clear_dropped(state, window.block)
    if spec.sink_pool.num:
        roll_back(state, spec, cut)
    for side, fmt in (("k", spec.k), ("v", spec.v)):
        fmt.cropped(side_of(state, side), window, length, closed)


def _clear_dropped(state: State, block: int) -> None:
    """Bits of slots past the row's end go back to 0, so that appends only ever set them."""
    flags = bits_to_bool(state["dropped"])
    offset = torch.arange(block, device=flags.device)
    index = torch.arange(flags.shape[2], device=flags.device)
    open_index = (index - state["closed"][:, None])[..., None] * block + offset
    is_open = (open_index >= 0) & (open_index < (state["length"] - state["open_start"])[:, None, None])
    alive = is_open | (offset < state["block_len"][..., None])
    state["dropped"].copy_(bool_to_bits(flags & alive[:, None]))
