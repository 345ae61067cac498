"""A model in full precision whose attention is looked at, or replaced in one layer, while it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from qattn_hf.attention import refuse_arguments, scores_of
from qattn_hf.layer import QAttnLayer
from qattn_hf.patcher import attending
from qattn_hf.stock_cache import stock_attention
from qattn_kernels.layer.scores import Scores

NAME = "qattn_observed"


class Call(NamedTuple):
    """One call of one layer's attention.

    Attributes:
        layer: its index.
        query: `[B, Hq, T, D]`, after the rotary embedding, as keys are.
        keys, values: `[B, Hkv, S, D]`, all that the model's own cache holds, the new ones last.
        scores: what the model asks of its scores.
        out: `[B, T, Hq, Dv]`, the attention's output in full precision.
    """

    layer: int
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scores: Scores
    out: torch.Tensor

    def of(self, rows: slice) -> Call:
        """The same of some rows."""
        query, keys, values, out = (x[rows] for x in (self.query, self.keys, self.values, self.out))
        return self._replace(query=query, keys=keys, values=values, out=out)

    def packed_out(self, layer: QAttnLayer) -> torch.Tensor:
        """Output `[B, T, Hq, Dv]` of a packed layer that gets the same call, and every earlier one, as its own."""
        tokens = self.query.shape[2]
        key, value = (x[:, :, -tokens:].contiguous() for x in (self.keys, self.values))
        handle, _ = layer.update(key, value)
        span = torch.tensor([[0, tokens]], dtype=torch.int32, device=key.device).expand(len(key), -1).contiguous()
        out, _ = layer.attend(self.query, handle, span, self.scores)
        return out.transpose(1, 2)


Observer = Callable[[Call], torch.Tensor | None]
_observer: ContextVar[Observer] = ContextVar("qattn_observer")


@contextmanager
def observed(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Hand every call of every layer's attention to `observer`; what it returns, if anything, goes on in its place.

    The model must not be patched and reads through transformers' own cache, rows without padding.

    Raises:
        UnsupportedError: a model whose attention cannot be reached. QAttnError: a patched model.
    """
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    token = _observer.set(observer)
    try:
        with attending(model, NAME):
            yield
    finally:
        _observer.reset(token)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    refuse_arguments(module, dropout, is_causal, kwargs, "this measurement")
    scores = scores_of(query, scaling, kwargs)
    out = stock_attention(module, query, key, value, attention_mask, scores)
    other = _observer.get()(Call(module.layer_idx, query, key, value, scores, out))
    return out if other is None else other.to(out.dtype).contiguous(), None
