"""Rows of tokens to read through a cache, and the choice of scored tokens."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf.assets import demo_tasks, prose
from qattn_hf.errors import QAttnError
from qattn_hf.model.device import device_of
from qattn_hf.reading.chunks import CHUNK, cuts, feed

UNSCORED = 3  # the first 1/3 of a row is read unscored, so that scored tokens attend to packed tokens


@dataclass(frozen=True)
class Reading:
    """Rows of a text, and how they are fed to a model. `read_as` makes one.

    Attributes:
        ids: int64 `[rows, T]`, without padding.
        at: boundaries of the chunks, as `chunks.cuts` makes them: whole chunks, then single steps as in a decode.
        first: index of the first scored token.
        batch: rows read at once.
    """

    ids: torch.Tensor
    at: list[int]
    first: int
    batch: int

    def groups(self) -> Iterator[torch.Tensor]:
        """Yield the rows, `[batch, T]` at a time."""
        yield from self.ids.split(self.batch)

    def calls(self) -> tuple[tuple[int, int, int], ...]:
        """Return rows, tokens and earlier blocks of the calls, as `warm.begin` takes them: 1 if there is any."""
        spans = list(itertools.pairwise(self.at))
        return tuple({(len(ids), stop - start, int(start > 0)): None for ids in self.groups() for start, stop in spans})

    def part(self, rows: slice) -> Reading:
        """Return this reading restricted to some rows."""
        return Reading(self.ids[rows], self.at, self.first, self.batch)


def read_as(ids: torch.Tensor, chunk: int = CHUNK, steps: int = 0, batch: int = 4) -> Reading:
    """Choose how rows are read: in chunks, the last tokens one by one, scored from a third of the row on.

    Args:
        ids: int64 `[rows, T]`.
        chunk: tokens of a call.
        steps: last tokens of a row that are fed one by one, as in a decode.
        batch: rows read at once.
    """
    tokens = ids.shape[1]
    return Reading(ids, cuts(tokens, chunk, steps), tokens // UNSCORED, batch)


def rows_of(tokenizer: Any, text: str, rows: int, tokens: int) -> torch.Tensor:
    """Cut rows of tokens out of a text, spread evenly over it, without overlap.

    Args:
        tokenizer: a tokenizer of Transformers. Its BOS token, if it has one, begins each row.
        rows, tokens: number of rows, and tokens of each.

    Returns:
        int64 `[rows, tokens]`.

    Raises:
        QAttnError: the text is too short.
    """
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    length = tokens - len(first)
    if rows < 1 or length < 1:
        raise QAttnError(f"{rows} rows of {tokens} tokens: give at least one row of two tokens")
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(ids) < rows * length:
        raise QAttnError(
            f"the text has {len(ids)} tokens; {rows} rows of {tokens} need {rows * length}. "
            "Fix: give a longer text, fewer rows (--rows) or shorter ones (--tokens)"
        )
    starts = [i * (len(ids) // rows) for i in range(rows)]
    return torch.tensor([first + ids[start : start + length] for start in starts], device="cpu")


def parted(ids: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split rows `[R, T]` in two: `first` rows, spread evenly over all, and the others."""
    places = [i * len(ids) // first for i in range(first)]
    others = [i for i in range(len(ids)) if i not in places]
    return ids[places], ids[others]


def made_text(characters: int, seed: int = 0) -> str:
    """Generate a text of at least `characters` characters, used if no file is given.

    Paragraphs of prose and code in random order alternate with word sums and lists to recall. Sums and lists alone
    would hide losses: models are so sure of their tokens that even 2 bits seem to cost nothing."""
    rng, parts, length = random.Random(seed), [], 0
    prompts = itertools.cycle((lambda: demo_tasks.few_shot(rng, shots=4), lambda: demo_tasks.recall(rng, n=20)))
    paragraphs: list[str] = []
    while length < characters:
        paragraphs = paragraphs or rng.sample(every := prose.TEXT.split("\n\n"), len(every))
        parts += [paragraphs.pop(), " ".join(next(prompts)())]
        length += len(parts[-2]) + len(parts[-1])
    return "\n\n".join(parts)


def full_logits(model: PreTrainedModel, ids: torch.Tensor, reading: Reading) -> list[torch.Tensor]:
    """Return logits of the scored tokens, a tensor `[B, t, vocabulary]` for each chunk, in the model's dtype."""
    chunks = feed(model, ids.to(device_of(model)), reading.at, unscored=reading.first)
    return [c.logits[:, max(0, reading.first - c.start) :].to(model.dtype) for c in chunks if c.stop > reading.first]
