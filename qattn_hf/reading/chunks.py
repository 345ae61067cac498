"""Text fed through one cache in chunks, so that what is scored was read back from packed tokens.

A single call over a whole text attends to its keys and values before they are packed: perplexity and multiple choice
would look lossless whatever the cache does to them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from qattn_hf.model._compat import CACHE

CHUNK = 61  # tokens; no multiple of a block or group, so that chunks end at every place within one


class Chunk(NamedTuple):
    """Model output for columns `start` to `stop` of each row.

    Attributes:
        logits: fp32 `[B, stop - start, vocabulary]`; those of column t predict the token of column t + 1.
        cache: the model's cache after the chunk.
    """

    start: int
    stop: int
    logits: torch.Tensor
    cache: Any


def cuts(tokens: int, chunk: int = CHUNK, steps: int = 0) -> list[int]:
    """Boundaries of chunks of a text of `tokens` tokens, 0 first: whole chunks, then the last `steps` tokens singly."""
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
        attention_mask: int64 `[B, T]`, 0 for padding, columns that the cache already holds included. With it, positions
            count a row's own tokens, as in `generate`: a padded row is read as it would be alone.
        cache: the cache to continue; by default the model makes one.
        unscored: first columns whose logits nobody needs. A chunk that ends there returns logits of its last column
            alone, where the model can leave the others out.
    """
    cached = 0 if cache is None else int(cache.get_seq_length())  # a packed cache counts on in the tensor it returns
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
    """Arguments of a call: the mask of all columns up to `stop`, and positions of the new ones."""
    if mask is None:
        return {}
    mask = mask[:, : cached + stop]
    return {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, cached + start :]}
