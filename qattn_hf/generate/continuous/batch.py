"""Group the requests of one forward into calls of a layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from qattn_hf.generate.continuous.pages import RESERVED, Left, Rows, Steps
from qattn_hf.layer.changes import with_room
from qattn_kernels.layout import Window

ROWS_STEP = 8  # round the rows of a call up to this multiple: fewer shapes, more launch plans reused


class Held(NamedTuple):
    """One request of a forward.

    Attributes:
        slot: its row.
        past: tokens stored before the forward.
        tokens: new tokens of the forward.
        pages: pages of its blocks, in order.
        new: True while its row is unwritten; `past` then counts the tokens of a shared prefix.
        left: blocks that leave the row with the new tokens. Only a row with a window has some (`rings.py`).
    """

    slot: int
    past: int
    tokens: int
    pages: list[int]
    new: bool
    left: int = 0


class _Placed(NamedTuple):
    """A request and the forward's column of its first token."""

    column: int
    held: Held


def batches(
    requests: Sequence[Held], window: Window, device: torch.device, slots: int, in_place: bool = False
) -> list[Steps]:
    """Group requests into calls: requests with one new token together, each longer one alone.

    Requests without new tokens are skipped.

    Args:
        window: sizes of the layers' blocks and of their open tokens.
        slots: rows of each layer.
        in_place: True if steps read pages where they are. Otherwise pages are copied to an arena, and calls are grouped
            by powers of two of the requests' block counts. An arena is then at most twice the size of its pages.
    """
    decoding: defaultdict[int, list[_Placed]] = defaultdict(list)
    calls: list[list[_Placed]] = []
    column = 0
    for held in requests:
        if held.tokens == 1 and not held.new:
            decoding[0 if in_place else len(held.pages).bit_length()].append(_Placed(column, held))
        elif held.tokens:
            calls.append([_Placed(column, held)])
        column += held.tokens
    found = [_steps(call, slots, column, device) for call in decoding.values()] if in_place else []
    calls += [] if in_place else decoding.values()
    return [*found, *(_rows(call, window, device) for call in calls)]


def _steps(call: list[_Placed], slots: int, columns: int, device: torch.device) -> Steps:
    """Make a call of one token per request over the pages in place.

    Args:
        columns: columns of the forward.
    """
    last = max(one.held.slot for one in call)
    count = min(slots, -(-(last + 1) // ROWS_STEP) * ROWS_STEP)
    blocks = with_room(max(len(one.held.pages) for one in call))
    placed = {one.held.slot: one for one in call}
    idle = _Placed(0, Held(0, 0, 0, [], False))
    found = [placed.get(slot, idle) for slot in range(count)]
    return Steps(
        columns=torch.tensor([[column] for column, _ in found], device=device),
        targets=torch.tensor([[column if held.tokens else columns] for column, held in found], device=device),
        span=torch.tensor([(0, held.tokens) for _, held in found], dtype=torch.int32, device=device),
        table=_table([held.pages for _, held in found], blocks, device),
        left=_left([held for _, held in found], device),
    )


def _table(pages: Sequence[list[int]], blocks: int, device: torch.device) -> torch.Tensor:
    nobody = RESERVED - 1
    table = [row + [nobody] * (blocks - len(row)) for row in pages]
    return torch.tensor(table, dtype=torch.int32, device=device)


def _left(requests: Sequence[Held], device: torch.device) -> Left | None:
    if not any(held.left for held in requests):
        return None
    blocks = torch.tensor([held.left for held in requests], dtype=torch.int32, device=device)
    return Left(blocks, torch.tensor([page for held in requests for page in held.pages[: held.left]], device=device))


def _rows(call: list[_Placed], window: Window, device: torch.device) -> Rows:
    """Make a call over copied pages."""
    tokens, requests, block = call[0].held.tokens, [one.held for one in call], window.block
    # If blocks leave a row, all its pages are written. Zeros then clear the masks of pages without a block.
    ends = [held.left + len(held.pages) if held.left else -(-(held.past + tokens) // block) for held in requests]
    changed = [_changed(held, end, window) for held, end in zip(requests, ends, strict=True)]
    written = [
        (row, index, held.pages[index % len(held.pages)]) for row, held in enumerate(requests) for index in changed[row]
    ]
    in_turn = len(call) == 1 and len(changed[0]) == ends[0] - min(changed[0], default=ends[0])
    columns = torch.tensor([range(column, column + tokens) for column, _ in call], device=device)
    return Rows(
        columns=columns,
        targets=columns,
        span=torch.tensor([(0, tokens)] * len(call), dtype=torch.int32, device=device),
        table=_table([held.pages[: -(-held.past // block)] for held in requests], with_room(max(ends)), device),
        left=_left(requests, device),
        slots=torch.tensor([held.slot for held in requests], device=device),
        written=torch.tensor(written, device=device).view(-1, 3).T,
        first=written[0][1] if in_turn and written else None,
        past=max(-(-held.past // block) for held in requests),
        begins=requests[0].past if requests[0].new else None,
    )


def _changed(held: Held, end: int, window: Window) -> list[int]:
    """Return the blocks before block `end` that a call may change: it closes them, or its new tokens are in them.

    Rows of a call may share the page of any other block. One row may close the block while another row still has a copy
    of the open block, and must not write the copy back.
    """
    oldest = max(0, held.past - window.residual - window.span + window.block) // window.block
    if held.left:  # pages of a row with a window are not shared
        return [*range(max(held.left, oldest), end)]
    closing = range(oldest, max(0, held.past + held.tokens - window.residual) // window.block)
    return sorted({*closing, *range(held.past // window.block, end)})


def row_of(held: Held, window: Window, device: torch.device) -> Rows:
    """Make a call of one request without new tokens, to read its row and pages."""
    return _rows([_Placed(0, held)], window, device)
