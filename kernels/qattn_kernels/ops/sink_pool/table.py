"""The table of sinks: its tensors, how an entry lives, and what rolling a row back does to it.

An entry is a token that is, or lately was, kept outside its block in the open form of its format. It is `born` at the
close that chose it, `evicted` at the one that pushed it out of the pool into the window, and `written` back at the one
that pushed it out of the window: all three are counts of closed blocks, 0 for not yet. Nothing moves: the block holds
the token's codes all along, by the block's own scales, clamped, and the token's bit in `dropped` says which of the two
is read. So a token that is written back costs no write, and a crop that reopens blocks undoes exactly what they did.
"""

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
    """The sinks of one side, `[B, Hkv, entries, D]`, as they lie in memory."""
    return fmt.ring({name.replace("sink", "ring"): t for name, t in side.items() if name.startswith("sink")})


def blank(sinks: Operand, where: torch.Tensor) -> None:
    """Zeros at the places `where` `[B, Hkv, entries]`."""
    sinks.x.masked_fill_(where[..., None], 0)
    if sinks.scale is not None:
        sinks.scale.masked_fill_(where, 0)


def changed(table: State, closed: torch.Tensor) -> torch.Tensor:
    """Entries `[B, Hkv, entries]` that changed place since `closed` `[B]` blocks: into the table, or back out of it."""
    born, written = (table[name] > closed[:, None, None] for name in ("born", "written"))
    return born ^ written


def at_slots(entries: torch.Tensor, slot: torch.Tensor, slots: int) -> torch.Tensor:
    """bool `[B, Hkv, slots]`: where one of the `entries` (bool) stands."""
    found = torch.zeros(*slot.shape[:2], slots + 1, dtype=torch.bool, device=slot.device)
    return found.scatter_(2, torch.where(entries, slot, slots).long(), True)[..., :slots]


def settle(state: State, closed: torch.Tensor) -> None:
    """End of a call that began with `closed` blocks: bits of `dropped` follow the table."""
    table = side_of(state, "sink")
    flip(state, at_slots(changed(table, closed), table["slot"], state["dropped"].shape[2:].numel() * 8))


def flip(state: State, flips: torch.Tensor) -> None:
    """Flip the bits of the slots `flips` `[B, Hkv, slots]`."""
    flags = bits_to_bool(state["dropped"])
    state["dropped"].copy_(bool_to_bits(flags ^ flips.view_as(flags)))


def roll_back(state: State, spec: LayerSpec, cut: torch.Tensor) -> None:
    """After a crop set `length` and `closed`: what reopened blocks did is dequantized, sinks that are no more go.

    `cut` `[B]`: rows that lost packed tokens beyond the horizon. There survivors stay as they are, for good.
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
