"""Log-likelihoods of continuations, read through one cache.

A batch is laid out around the place where each row's scored tokens begin:

    . . c c c c | s s .        c  context but its last token, padded on the left
    c c c c c c | s s s        s  the context's last token and the continuation but its last, which predict the latter

Chunks are counted from there in both directions, so the first scored token reads its whole context from the cache and
a row is cut at the same places whatever stands beside it. Calls are as wide, too: a cache reads short calls as it
reads a decode step, longer ones as a prompt. Short continuations, as of multiple choice, are short calls; all others
are whole chunks, padded where they end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from qattn_hf.cache import QAttnCache
from qattn_hf.chunks import feed
from qattn_hf.device import device_of
from qattn_kernels.layer.spec import SHORT_CALL


class Text(NamedTuple):
    """What one row reads, and what may follow.

    Attributes:
        tokens: the inputs.
        continuations: each is scored after `tokens` without its own tokens but the last: of `ab`, `b` is the last
            input. Choices of one token share a row.
    """

    tokens: tuple[int, ...]
    continuations: list[list[int]]

    @property
    def scored(self) -> int:
        """Inputs at the end of the row that predict."""
        return max(map(len, self.continuations))

    @property
    def short(self) -> bool:
        """Whether they are read as a decode reads; no batch holds both kinds."""
        return self.scored <= SHORT_CALL


class Scored(NamedTuple):
    """Of one row.

    Attributes:
        answers: for each continuation its log-likelihood, and whether each token of it is the likeliest.
        through_packed: scored inputs that found packed tokens in the cache.
    """

    answers: list[tuple[float, bool]]
    through_packed: int


def packed_by_row(cache: Any) -> list[int]:
    """Packed tokens of each row in the layer that packed least; all 0 in a cache of transformers."""
    if not isinstance(cache, QAttnCache):
        return []
    windowed = (layer.spec.k.windowed or layer.spec.v.windowed for layer in cache.layers)
    rows = [
        layer.state["block_len"].sum(1).cpu() if w else layer.state["length"].cpu()
        for w, layer in zip(windowed, cache.layers, strict=True)
    ]
    return torch.stack([row.long() for row in rows]).amin(0).tolist()


@torch.inference_mode()
def score(
    model: Any, texts: Sequence[Text], chunk: int, pad: int, dtype: torch.dtype | None = None
) -> tuple[list[Scored], Any]:
    """Score a batch.

    Args:
        texts: all short or all not.
        chunk: tokens of a call.
        pad: a token for the places that the mask hides.
        dtype: of the log-softmax, by default fp32.

    Returns:
        one `Scored` a text, and the cache.
    """
    ids, mask, before, at = _laid_out(texts, chunk, pad)
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
        if not all(packed):  # asks the device
            packed = packed_by_row(call.cache) or packed
    return [Scored(*row) for row in zip(totals, through, strict=True)], call.cache


def _laid_out(texts: Sequence[Text], chunk: int, pad: int) -> tuple[torch.Tensor, torch.Tensor, int, list[int]]:
    """Ids and mask `[B, T]`, the column where all rows begin to be scored, and the ends of all calls, 0 first."""
    before = -(-max(len(text.tokens) - text.scored for text in texts) // chunk) * chunk
    after = max(text.scored for text in texts)
    step = min(chunk, SHORT_CALL) if texts[0].short else chunk
    after = after if texts[0].short else -(-after // step) * step
    ids, mask = (torch.full((len(texts), before + after), fill, dtype=torch.long) for fill in (pad, 0))
    for row, hidden, text in zip(ids, mask, texts, strict=True):
        start = before - (len(text.tokens) - text.scored)
        row[start : start + len(text.tokens)] = torch.tensor(text.tokens)
        hidden[start : start + len(text.tokens)] = 1
    ends = [*range(before + step, before + after, step), before + after]
    return ids, mask, before, [*range(0, before + 1, chunk), *ends]


def _add(
    total: tuple[float, bool], continuation: list[int], scored: int, log_probs: torch.Tensor, first: int, stop: int
) -> tuple[float, bool]:
    """Add what a chunk, log-probabilities `[stop - first, vocabulary]` of the scored inputs from `first` on, says."""
    skip = scored - len(continuation)  # a shorter continuation begins later
    start, end = max(first, skip), min(stop, scored)
    if start >= end:
        return total
    rows = log_probs[start - first : end - first]
    target = torch.tensor(continuation[start - skip : end - skip], device=rows.device)
    value = rows.gather(1, target[:, None]).double().sum()
    return total[0] + float(value), total[1] and bool((rows.argmax(1) == target).all())
