"""The requests of one forward, sorted into calls of a layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from qattn_hf.continuous.pages import RESERVED, Rows
from qattn_hf.layer import with_room
from qattn_kernels.layer.spec import LayerSpec


class Held(NamedTuple):
    """A request of a forward.

    Attributes:
        slot: its row. past: tokens that it has stored. tokens: of this forward. pages: of its blocks, in order.
        new: nothing was written to its row yet; `past` are then tokens of a shared prefix.
    """

    slot: int
    past: int
    tokens: int
    pages: list[int]
    new: bool


class _Placed(NamedTuple):
    """A request and the first column of its tokens."""

    column: int
    held: Held


def batches(
    requests: Sequence[Held], specs: Sequence[LayerSpec], device: torch.device, in_place: bool = False
) -> list[Rows]:
    """Calls that serve these requests: those with one token together; each other one alone.

    Args:
        specs: of all layers, whose blocks have one size.
        in_place: pages are read where they lie. Where they are copied into an arena, calls are by powers of two of the
            requests' blocks, so that arenas are at most twice their pages.
    """
    reach = max(spec.window.span + spec.window.residual for spec in specs)
    if any(spec.sink_pool.num for spec in specs):  # a sink that leaves the pool changes the mask of its block
        reach = max((held.past for held in requests), default=0)
    decoding: defaultdict[int, list[_Placed]] = defaultdict(list)
    calls: list[list[_Placed]] = []
    column = 0
    for held in requests:
        if held.tokens == 1 and not held.new:
            decoding[0 if in_place else len(held.pages).bit_length()].append(_Placed(column, held))
        else:
            calls.append([_Placed(column, held)])
        column += held.tokens
    return [_rows(call, specs[0].window.block, reach, device) for call in (*decoding.values(), *calls)]


def _rows(call: list[_Placed], block: int, reach: int, device: torch.device) -> Rows:
    """One call, over blocks of `block` tokens, of which it changes those of the last `reach` tokens and its own."""
    call = sorted(call, key=lambda one: one.held.slot)
    tokens, slots = call[0].held.tokens, [one.held.slot for one in call]
    blocks = with_room(max(len(one.held.pages) for one in call))

    def tensor(values: Iterable[Sequence[int]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)

    written = [
        (row, index, held.pages[index])
        for row, (_, held) in enumerate(call)
        for index in range(max(0, held.past - reach) // block, -(-(held.past + held.tokens) // block))
    ]
    nobody = RESERVED - 1
    return Rows(
        columns=tensor(range(column, column + tokens) for column, _ in call),
        span=tensor(((0, tokens) for _ in call), torch.int32),
        slots=torch.tensor(slots, device=device),
        first_slot=slots[0] if slots == list(range(slots[0], slots[0] + len(slots))) else None,
        table=tensor((held.pages + [nobody] * (blocks - len(held.pages)) for _, held in call), torch.int32),
        written=tensor(written).view(-1, 3).T,
        past=max(-(-held.past // block) for _, held in call),
        begins=call[0].held.past if call[0].held.new else None,
    )
