"""Compute log-likelihoods of continuations, read through one cache.

Rows of a batch are aligned at the column where their scored tokens begin:

    . . c c c c | s s .        c  context without its last token, padded on the left
    c c c c c c | s s s        s  inputs that predict the continuation: last token of the context, then all but
                                  the last token of the continuation

Chunks are counted from this column in both directions. So the first scored token reads its whole context from the
cache, and a row is cut at the same places in any batch.

Short continuations, as in multiple choice, are scored in short calls, which a cache reads as decode steps. Others are
scored in whole chunks, padded at the end, as prompts.
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
        continuations: continuations with these inputs. Continuations that differ only in their last token share a row.
    """

    tokens: tuple[int, ...]
    continuations: list[list[int]]

    @property
    def scored(self) -> int:
        """Number of inputs, at the end of the row, whose predictions are scored."""
        return max(map(len, self.continuations))

    @property
    def short(self) -> bool:
        """Whether the row is scored in short calls, as decode steps. A batch has only short or only long texts."""
        return self.scored <= SHORT_CALL


class Scored(NamedTuple):
    """Scores of one row.

    Attributes:
        answers: for each continuation, its log-likelihood and whether every token of it is the likeliest one.
        through_packed: number of scored inputs that could read packed tokens.
    """

    answers: list[tuple[float, bool]]
    through_packed: int


def packed_by_row(cache: Any) -> list[int]:
    """Return the packed tokens of each row in the layer that packed fewest, or [] if no layer is packed."""
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
        model: patched or unpatched model.
        texts: all short or all long.
        chunk: tokens of a call.
        pad: id of the padding token.
        dtype: dtype of the log-softmax. Default: fp32.

    Returns:
        One `Scored` for each text, and the cache.
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
    """Return ids and mask, int64 `[B, T]`, the column where scored tokens begin, and the boundaries of calls."""
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
        scored: number of scored inputs of the row. The chunk has inputs `first` to `stop`.
        log_probs: their log-probabilities, `[stop - first, vocabulary]`.
    """
    skip = scored - len(continuation)  # a shorter continuation begins later
    start, end = max(first, skip), min(stop, scored)
    if start >= end:
        return total
    rows = log_probs[start - first : end - first]
    target = torch.tensor(continuation[start - skip : end - skip], device=rows.device)
    value = rows.gather(1, target[:, None]).double().sum()
    return total[0] + float(value), total[1] and bool((rows.argmax(1) == target).all())
