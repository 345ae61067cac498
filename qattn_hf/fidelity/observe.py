"""Observe the attention calls of a model in full precision, or replace the output of some layers."""

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
        layer: index of the layer.
        query: `[B, Hq, T, D]`, after the rotary embedding, as keys are.
        keys, values: `[B, Hkv, S, D]`, all of the model's own cache, the new tokens last.
        scores: softmax scale, soft cap and learned sinks.
        out: `[B, T, Hq, Dv]`, output of the attention in full precision.
    """

    layer: int
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scores: Scores
    out: torch.Tensor

    def of(self, rows: slice) -> Call:
        """The call restricted to some rows of the batch."""
        query, keys, values, out = (x[rows] for x in (self.query, self.keys, self.values, self.out))
        return self._replace(query=query, keys=keys, values=values, out=out)

    def packed_out(self, layer: QAttnLayer) -> torch.Tensor:
        """Feed the call to a packed layer, which had all earlier ones, and return its output `[B, T, Hq, Dv]`."""
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
    """Context in which `observer` gets every attention call of a model; a tensor it returns replaces the output.

    Args:
        model: not patched. It reads through transformers' own cache, rows without padding.
        observer: called with a `Call`; returns `[B, T, Hq, Dv]` or None.

    Raises:
        UnsupportedError: a model whose attention cannot be replaced.
        QAttnError: the model is patched.
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
    replacement = _observer.get()(Call(module.layer_idx, query, key, value, scores, out))
    return out if replacement is None else replacement.to(out.dtype).contiguous(), None
