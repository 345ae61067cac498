"""Repack the first blocks of a layer with fewer bits."""

from __future__ import annotations

import torch

from qattn_kernels.formats.traits import may_age
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import State, TensorSpec, copy_blocks
from qattn_kernels.ops.sink_pool.table import at_slots
from qattn_kernels.reference.rows import bits_to_bool


def in_pool(state: State, like: torch.Tensor) -> torch.Tensor:
    """bool `[B, Hkv, blocks, block]`, shaped as `like`: tokens that the sink pool keeps out of their blocks."""
    table = side_of(state, "sink")
    inside = (table["born"] > 0) & (table["written"] == 0)
    found = at_slots(inside, table["slot"], state["dropped"].shape[2:].numel() * 8)
    return found.unflatten(2, (-1, like.shape[3]))[:, :, : like.shape[2]]


def repack(state: State, old: LayerSpec, out: State, new: LayerSpec, tensors: dict[str, TensorSpec]) -> None:
    """Copy a layer to one with another block capacity and fewer bits per code.

    Args:
        state, old: the layer's state tensors and its spec.
        out, new: state tensors and spec of the copy. Its formats have other bits (`AgedBlocks.with_bits`), and it has
            room for all closed blocks.
        tensors: shapes and roles of `out`.
    """
    for name, tensor in tensors.items():
        if name[2:7] != "codes":
            copy_blocks(state[name], tensor, out[name])
    blocks = min(state["block_len"].shape[1], out["block_len"].shape[1])
    dropped, length = state["dropped"][:, :, :blocks], state["block_len"][:, None, :blocks, None]
    there = torch.arange(old.window.block, device=dropped.device) < length
    keep = there & ~bits_to_bool(dropped)
    for side in "kv":
        fmt, wanted = may_age(getattr(old, side)), may_age(getattr(new, side))
        if side == "v" and old.sink_pool.num:  # a block closed with the values of its sinks included
            keep = keep | in_pool(state, keep)
        fmt.recode(side_of(state, side), wanted, side_of(out, side), keep, length[:, 0, :, 0] > 0)
