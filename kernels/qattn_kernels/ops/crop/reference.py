"""Remove tokens from the end of every row."""

from __future__ import annotations

import torch

from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import State
from qattn_kernels.ops.sink_pool.table import roll_back
from qattn_kernels.reference.rows import bits_to_bool, bool_to_bits


def crop(state: State, spec: LayerSpec, drop: int) -> None:
    """Remove the last `drop` tokens of every row, in place. The caller has checked that none of them is padding.

    A crop within the horizon of a row's longest length reopens the blocks that lose tokens. The ring still holds their
    tokens, so the row equals one that never saw the removed tokens. After a larger crop the remaining tokens keep their
    codes, `block_len` masks the empty slots, and the next token opens a new block. Formats that write each token in its
    final form can always reopen a block.
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
    cut = ~near & (length < state["open_start"])  # a far crop of packed tokens: the last block may become short

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
    """Clear the bits of slots past the row's end, so that an append only has to set bits."""
    flags = bits_to_bool(state["dropped"])
    offset = torch.arange(block, device=flags.device)
    index = torch.arange(flags.shape[2], device=flags.device)
    open_index = (index - state["closed"][:, None])[..., None] * block + offset
    is_open = (open_index >= 0) & (open_index < (state["length"] - state["open_start"])[:, None, None])
    alive = is_open | (offset < state["block_len"][..., None])
    state["dropped"].copy_(bool_to_bits(flags & alive[:, None]))
