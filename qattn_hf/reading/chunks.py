"""Feed text through one cache in chunks, so that scored tokens read back packed tokens.

A single call over a whole text attends to keys and values before they are packed. Perplexity and multiple choice would
then look lossless with any cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from qattn_hf.model._compat import CACHE

CHUNK = 61  # tokens; not a multiple of a block or group, so that chunks end at every place within a block


class Chunk(NamedTuple):
    """Model output for columns `start` to `stop` of each row.

    Attributes:
        logits: fp32 `[B, stop - start, vocabulary]`. Logits of column t predict the token of column t + 1.
        cache: the model's cache after the chunk.
    """

    start: int
    stop: int
    logits: torch.Tensor
    cache: Any


def cuts(tokens: int, chunk: int = CHUNK, steps: int = 0) -> list[int]:
    """Return chunk boundaries of `tokens` tokens, 0 first: whole chunks, then the last `steps` tokens singly."""
    steps = min(steps, tokens)
    return [*range(0, tokens - steps, chunk), *range(tokens - steps, tokens + 1)]


@torch.inference_mode()
def feed(
    model: Any,
    ids: torch.Tensor,
    at: list[int],
    attention_mask: torch.Tensor | None = None,
    cache: Any = None,
    unscored: int = 0,
) -> Iterator[Chunk]:
    """Feed rows of tokens through one cache, a chunk at a time, and yield a `Chunk` for each.

    Args:
        ids: int64 `[B, T]`.
        at: boundaries of the chunks, as `cuts` makes them.
        attention_mask: int64 `[B, T]`, 0 for padding, including the columns already in the cache. With a mask,
            positions count only a row's real tokens, as in `generate`. A padded row is thus read as it would be alone.
        cache: the cache to continue. The model makes one by default.
        unscored: number of first columns whose logits are not needed. A chunk that ends within them returns logits of
            its last column alone, if the model can skip the others.
    """
    cached = 0 if cache is None else int(cache.get_seq_length())  # copied: a packed cache counts on in its tensor
    last_alone = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    for start, stop in pairwise(at):
        out = model(
            ids[:, start:stop],
            use_cache=True,
            **{CACHE: cache},
            **_mask_arguments(attention_mask, cached, start, stop),
            **(last_alone if stop <= unscored else {}),
        )
        cache = out[CACHE]
        yield Chunk(start, stop, out.logits.float(), cache)


def _mask_arguments(mask: torch.Tensor | None, cached: int, start: int, stop: int) -> dict[str, torch.Tensor]:
    """Return arguments of a call: the mask of all columns up to `stop`, and positions of the new columns."""
    if mask is None:
        return {}
    mask = mask[:, : cached + stop]
    return {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, cached + start :]}
