"""Rows of tokens to be read through a cache, and which of them are scored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from qattn_hf import demo_tasks
from qattn_hf.chunks import CHUNK, cuts
from qattn_hf.errors import QAttnError

READ_BEFORE = 3  # one part in so many of a row is read before anything is scored, so that codes are attended to


@dataclass(frozen=True)
class Reading:
    """Rows of a text and how they are read.

    Attributes:
        ids: `[rows, T]`; all rows are as long as one another, so no token is padding.
        at: where chunks end, as `chunks.cuts` makes it: whole chunks, then single steps as in a decode.
        first: the first token whose prediction is scored.
        batch: rows read at once; full precision's logits are kept for so many rows and no more.
    """

    ids: torch.Tensor
    at: list[int]
    first: int
    batch: int

    def groups(self) -> Iterator[torch.Tensor]:
        """The rows, `batch` at a time."""
        yield from self.ids.split(self.batch)

    def part(self, rows: slice) -> Reading:
        """The same of some rows."""
        return Reading(self.ids[rows], self.at, self.first, self.batch)


def read_as(ids: torch.Tensor, chunk: int = CHUNK, steps: int = 0, batch: int = 4) -> Reading:
    """How rows `[rows, T]` are read: chunks, the last `steps` tokens one by one, scored from a third of the row on."""
    tokens = ids.shape[1]
    return Reading(ids, cuts(tokens, chunk, steps), tokens // READ_BEFORE, batch)


def rows_of(tokenizer: Any, text: str, rows: int, tokens: int) -> torch.Tensor:
    """`[rows, tokens]` from all over a text, evenly, since neighbouring pages are much alike; none overlaps another.

    Each row starts with the tokenizer's first token, if it has one.

    Raises:
        QAttnError: if the text is too short, with how many rows it has.
    """
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    length = tokens - len(first)
    if rows < 1 or length < 1:
        raise QAttnError(f"{rows} rows of {tokens} tokens: give at least one row of two tokens")
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(ids) < rows * length:
        raise QAttnError(
            f"the text has {len(ids)} tokens, which is enough for {len(ids) // length} rows of {tokens} and not for "
            f"{rows}: give a longer text, fewer rows or fewer tokens a row"
        )
    starts = [i * (len(ids) // rows) for i in range(rows)]
    return torch.tensor([first + ids[start : start + length] for start in starts])


def parted(ids: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`first` of some rows, evenly from all of them, and the others."""
    places = [i * len(ids) // first for i in range(first)]
    others = [i for i in range(len(ids)) if i not in places]
    return ids[places], ids[others]


def made_text(characters: int, seed: int = 0) -> str:
    """Sums and lists of about so many characters, for models that come without a text."""
    rng, parts, length = random.Random(seed), [], 0
    while length < characters:
        for prompt, answer in (demo_tasks.few_shot(rng, shots=4), demo_tasks.recall(rng, n=20)):
            parts.append(f"{prompt} {answer}")
            length += len(parts[-1])
    return "\n\n".join(parts)
