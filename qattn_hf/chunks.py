"""Text fed through one cache in chunks, so that what is scored was read back from packed tokens.

A single call over a whole text attends to its keys and values before they are packed: perplexity and multiple choice
would look lossless whatever the cache does to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch

CHUNK = 61  # tokens; no multiple of a block or a group, so that chunks end anywhere in them


class Chunk(NamedTuple):
    """Logits of the tokens `start` to `stop` of each row, which predict the tokens one further.

    Attributes:
        logits: fp32 `[B, stop - start, vocabulary]`.
        cache: the model's cache after the chunk.
    """

    start: int
    stop: int
    logits: torch.Tensor
    cache: Any


def cuts(tokens: int, chunk: int = CHUNK, steps: int = 0) -> list[int]:
    """Where chunks of a text end, 0 first: whole chunks, then the last `steps` tokens one by one, as a decode does."""
    steps = min(steps, tokens)
    return [*range(0, tokens - steps, chunk), *range(tokens - steps, tokens + 1)]


@torch.inference_mode()
def feed(
    model: Any, ids: torch.Tensor, at: list[int], attention_mask: torch.Tensor | None = None, cache: Any = None
) -> Iterator[Chunk]:
    """Rows of tokens `[B, T]` through one cache, a chunk at a time: `at` as `cuts` makes it.

    Args:
        attention_mask: int64 `[B, T]`, 0 where a row is padded; of what the cache holds already, too. With it positions
            count a row's own tokens, as in `generate`: a padded row reads what it would read alone.
        cache: what to continue; by default the model makes one.
    """
    held = 0 if cache is None else int(cache.get_seq_length())  # a packed cache counts on in the tensor it returns
    for start, stop in pairwise(at):
        out = model(
            ids[:, start:stop], past_key_values=cache, use_cache=True, **_masked(attention_mask, held, start, stop)
        )
        cache = out.past_key_values
        yield Chunk(start, stop, out.logits.float(), cache)


def _masked(mask: torch.Tensor | None, held: int, start: int, stop: int) -> dict[str, torch.Tensor]:
    """The mask of all tokens up to `stop`, and the new ones' positions."""
    if mask is None:
        return {}
    mask = mask[:, : held + stop]
    return {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, held + start :]}
