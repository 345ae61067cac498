"""The sink table: its tensors, the life of an entry, and the effect of a rollback.

An entry is a token that is, or recently was, kept outside its block, stored as the ring stores tokens. The closes of a
row are numbered from 1. Three of these numbers record the life of an entry; 0 means not yet:

- `born`: the close that chose the token.
- `evicted`: the close that pushed it out of the pool into the window.
- `written`: the close that pushed it out of the window, back to its block.

No data moves. The block always holds the token's codes, clamped to the block's scales, and the token's bit in `dropped`
tells which copy is read. Writing a token back therefore costs no write, and a crop that reopens blocks undoes their
changes exactly."""

from __future__ import annotations

import torch

from qattn_kernels.formats import Format, Operand
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import State
from qattn_kernels.reference.rows import bits_to_bool, bool_to_bits

TIMES = ("born", "evicted", "written")
FIELDS = ("pos", "slot", *TIMES, "norm")


def read_sinks(side: State, fmt: Format) -> Operand:
    """Return the sinks of one side, `[B, Hkv, entries, D]`, as views of its state tensors `side`."""
    return fmt.ring({name.replace("sink", "ring"): t for name, t in side.items() if name.startswith("sink")})


def blank(sinks: Operand, where: torch.Tensor) -> None:
    """Set the places `where` `[B, Hkv, entries]` to zero."""
    sinks.x.masked_fill_(where[..., None], 0)
    if sinks.scale is not None:
        sinks.scale.masked_fill_(where, 0)


def changed(table: State, closed: torch.Tensor) -> torch.Tensor:
    """Return bool `[B, Hkv, entries]`: entries whose token a close after the first `closed` `[B]` ones moved out of its
    block or back to it, and not both."""
    born, written = (table[name] > closed[:, None, None] for name in ("born", "written"))
    return born ^ written


def at_slots(entries: torch.Tensor, slot: torch.Tensor, slots: int) -> torch.Tensor:
    """Return bool `[B, Hkv, slots]`: true at the slots of the selected `entries` (bool)."""
    found = torch.zeros(*slot.shape[:2], slots + 1, dtype=torch.bool, device=slot.device)
    return found.scatter_(2, torch.where(entries, slot, slots).long(), True)[..., :slots]


def settle(state: State, closed: torch.Tensor) -> None:
    """Update the bits of `dropped` from the table, at the end of a call that began with `closed` blocks."""
    table = side_of(state, "sink")
    flip(state, at_slots(changed(table, closed), table["slot"], state["dropped"].shape[2:].numel() * 8))


def flip(state: State, flips: torch.Tensor) -> None:
    """Flip the bits of the slots `flips` `[B, Hkv, slots]`."""
    flags = bits_to_bool(state["dropped"])
    state["dropped"].copy_(bool_to_bits(flags ^ flips.view_as(flags)))


def roll_back(state: State, spec: LayerSpec, cut: torch.Tensor) -> None:
    """Roll the table back after a crop set `length` and `closed`. Removes sinks that the crop took away.

    `cut` bool `[B]`: rows that lost packed tokens beyond the horizon. Their surviving sinks stay in place permanently.
    """
    table = side_of(state, "sink")
    closed, length = state["closed"][:, None, None], state["length"][:, None, None]
    slots = state["dropped"].shape[2:].numel() * 8
    before = at_slots((table["born"] > 0) & (table["written"] == 0), table["slot"], slots)
    gone = (table["pos"] >= length) | ((table["born"] > closed) & ~cut[:, None, None])
    for name in TIMES:
        late = table[name] > closed
        kept = torch.where(cut[:, None, None], closed.expand_as(late), 0)
        table[name].copy_(torch.where(late, kept, table[name]))
    after = at_slots((table["born"] > 0) & (table["written"] == 0) & ~gone, table["slot"], slots)
    for name in FIELDS:
        table[name].masked_fill_(gone, 0)
    for name, fmt in (("k", spec.k), ("v", spec.v)):
        blank(read_sinks(side_of(state, name), fmt), gone)
    flags = bits_to_bool(state["dropped"])
    seen = (flags & ~before.view_as(flags)) | after.view_as(flags)
    state["dropped"].copy_(bool_to_bits(seen))
