"""Log-likelihoods of continuations, read through one cache.

Rows of a batch are aligned at the column where their scored tokens begin:

    . . c c c c | s s .        c  context but its last token, padded on the left
    c c c c c c | s s s        s  the context's last token and the continuation but its last, which predict the latter

Chunks are counted from there in both directions, so the first scored token reads its whole context from the cache, and
a row is cut at the same places whatever the other rows are. Short continuations, as of multiple choice, are scored in
short calls, which a cache reads as decode steps; all others in whole chunks, padded at the end, as prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from qattn_hf.cache.cache import QAttnCache
from qattn_hf.model.device import device_of
from qattn_hf.reading.chunks import feed
from qattn_kernels.layer.spec import SHORT_CALL


class Text(NamedTuple):
    """One row: input tokens, and the continuations that are scored.

    Attributes:
        tokens: the inputs: the context, and a continuation without its last token.
        continuations: continuations with these inputs; those that differ only in their last token share a row.
    """

    tokens: tuple[int, ...]
    continuations: list[list[int]]

    @property
    def scored(self) -> int:
        """Number of inputs, at the end of the row, whose predictions are scored."""
        return max(map(len, self.continuations))

    @property
    def short(self) -> bool:
        """Whether it is scored in a short call, as a decode step; no batch mixes short and long texts."""
        return self.scored <= SHORT_CALL


class Scored(NamedTuple):
    """Scores of one row.

    Attributes:
        answers: for each continuation the log-likelihood, and whether every token of it is the most likely one.
        through_packed: number of scored inputs that could read packed tokens.
    """

    answers: list[tuple[float, bool]]
    through_packed: int


def packed_by_row(cache: Any) -> list[int]:
    """Packed tokens of each row, in the packed layer that packed least; an empty list where no layer is packed."""
    if not isinstance(cache, QAttnCache) or not cache.packed:
        return []
    windowed = (layer.spec.k.windowed or layer.spec.v.windowed for layer in cache.packed)
    rows = [
        layer.state["block_len"].sum(1).cpu() if w else layer.state["length"].cpu()
        for w, layer in zip(windowed, cache.packed, strict=True)
    ]
    return torch.stack([row.long() for row in rows]).amin(0).tolist()


@torch.inference_mode()
def score(
    model: Any, texts: Sequence[Text], chunk: int, pad: int, dtype: torch.dtype | None = None
) -> tuple[list[Scored], Any]:
    """Score a batch.

    Args:
        texts: all short or all long.
        chunk: tokens of a call.
        pad: id of the padding token.
        dtype: of the log-softmax; default fp32.

    Returns:
        one `Scored` for each text, and the cache.
    """
    ids, mask, before, at = _aligned(texts, chunk, pad)
    totals = [[(0.0, True)] * len(text.continuations) for text in texts]
    through, packed = [0] * len(texts), [0] * len(texts)
    for call in feed(model, ids.to(device_of(model)), at, mask.to(device_of(model))):
        if call.start >= before:
            log_probs = call.logits.log_softmax(-1, dtype=dtype)
            first, stop = call.start - before, call.stop - before
            for i, text in enumerate(texts):
                for j, continuation in enumerate(text.continuations):
                    totals[i][j] = _add(totals[i][j], continuation, text.scored, log_probs[i], first, stop)
                through[i] += max(0, min(stop, text.scored) - first) if packed[i] else 0
        if not all(packed):  # waits for the device
            packed = packed_by_row(call.cache) or packed
    return [Scored(*row) for row in zip(totals, through, strict=True)], call.cache


def _aligned(texts: Sequence[Text], chunk: int, pad: int) -> tuple[torch.Tensor, torch.Tensor, int, list[int]]:
    """Ids and mask, int64 `[B, T]`, the column where scored tokens begin, and the boundaries of calls, 0 first."""
    before = -(-max(len(text.tokens) - text.scored for text in texts) // chunk) * chunk
    after = max(text.scored for text in texts)
    step = min(chunk, SHORT_CALL) if texts[0].short else chunk
    after = after if texts[0].short else -(-after // step) * step
    ids, mask = (torch.full((len(texts), before + after), fill, dtype=torch.long, device="cpu") for fill in (pad, 0))
    for row, row_mask, text in zip(ids, mask, texts, strict=True):
        start = before - (len(text.tokens) - text.scored)
        row[start : start + len(text.tokens)] = torch.tensor(text.tokens, device="cpu")
        row_mask[start : start + len(text.tokens)] = 1
    ends = [*range(before + step, before + after, step), before + after]
    return ids, mask, before, [*range(0, before + 1, chunk), *ends]


def _add(
    total: tuple[float, bool], continuation: list[int], scored: int, log_probs: torch.Tensor, first: int, stop: int
) -> tuple[float, bool]:
    """Add a chunk's part of a continuation's score to `total`.

    Args:
        scored: scored inputs of the row, of which the chunk has those from `first` to `stop`.
        log_probs: `[stop - first, vocabulary]`, their log-probabilities.
    """
    skip = scored - len(continuation)  # a shorter continuation begins later
    start, end = max(first, skip), min(stop, scored)
    if start >= end:
        return total
    rows = log_probs[start - first : end - first]
    target = torch.tensor(continuation[start - skip : end - skip], device=rows.device)
    value = rows.gather(1, target[:, None]).double().sum()
    return total[0] + float(value), total[1] and bool((rows.argmax(1) == target).all())
