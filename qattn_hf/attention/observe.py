"""Observe the attention calls of a model in full precision, or replace the output of some layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from qattn_hf.attention import model_attention
from qattn_hf.attention.attention import refuse_arguments, scores_of
from qattn_hf.attention.stock_cache import stock_attention
from qattn_hf.errors import UnsupportedError
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.layer.window_layer import WindowLayer
from qattn_hf.model import latent
from qattn_hf.model.layer_kinds import hides, model_layers, of_method
from qattn_hf.model.selection import attending
from qattn_kernels.layer.scores import Scores

NAME = "qattn_observed"


class Call(NamedTuple):
    """One call of one layer's attention.

    Attributes:
        layer: index of the layer.
        query: `[B, Hq, T, D]`, after the rotary embedding, like the keys.
        keys, values: `[B, Hkv, S, D]`, all that Transformers' cache returned, new tokens last; for a sliding window,
            those that it shows.
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
        """Return the call restricted to some rows of the batch."""
        query, keys, values, out = (x[rows] for x in (self.query, self.keys, self.values, self.out))
        return self._replace(query=query, keys=keys, values=values, out=out)

    def packed_out(self, layer: QAttnLayer) -> torch.Tensor:
        """Feed the call to a packed layer that had all earlier calls. Return its output `[B, T, Hq, Dv]`."""
        tokens = self.query.shape[2]
        key, value = (x[:, :, -tokens:].contiguous() for x in (self.keys, self.values))
        handle, _ = layer.update(key, value)
        span = torch.tensor([[0, tokens]], dtype=torch.int32, device=key.device).expand(len(key), -1).contiguous()
        out, _ = layer.attend(self.query, handle, span, self.scores)
        return out.transpose(1, 2)


def attention_mass(call: Call) -> torch.Tensor:
    """Return the attention weight that each token gets, summed over a call's queries: `[Hkv, S]`, mean over the query
    heads."""
    query, keys = call.query[0].float(), call.keys[0].float()
    heads, tokens, size = keys.shape[0], query.shape[1], keys.shape[1]
    grouped = query.view(heads, -1, *query.shape[1:])  # [Hkv, G, T, D]
    s = grouped @ keys[:, None].mT * call.scores.scale
    if call.scores.softcap:
        s = call.scores.softcap * torch.tanh(s / call.scores.softcap)
    visible = torch.ones(tokens, size, dtype=torch.bool, device=s.device).tril(size - tokens)
    s = s.masked_fill(~visible, -torch.inf)
    if call.scores.sinks is not None:  # a learned sink: its weight belongs to no token
        extra = call.scores.sinks.view(heads, -1, 1, 1).expand(*s.shape[:3], 1)
        return torch.cat([s, extra], -1).softmax(-1)[..., :-1].mean(1).sum(1).cpu()
    return s.softmax(-1).mean(1).sum(1).cpu()


Observer = Callable[[Call], torch.Tensor | None]


class Watch(NamedTuple):
    """Layers under observation: `packed` ones, which have full attention, and `windows`.

    All layers outside `packed` compute with the attention `own`; None if there are none.
    """

    observer: Observer
    packed: frozenset[int]
    windows: frozenset[int]
    own: str | None


_watch: ContextVar[Watch] = ContextVar("qattn_watch")


def packed_layers(model: PreTrainedModel) -> list[int]:
    """Return the indices of the layers that `patch` packs, in order, without sliding windows.

    Raises:
        UnsupportedError: there are none, or they have latent attention.
    """
    return _observable(model, ())


def _observable(model: PreTrainedModel, windows: Collection[int]) -> list[int]:
    """Return `packed_layers`, or an empty list if there are none but `windows` are requested."""
    latent.check_stock(model)
    packed = [i for i, own in enumerate(model_layers(model.config)) if own is None]
    if not packed and not windows:
        raise UnsupportedError(f"{model.config.model_type}: no layer can be packed, so nothing can be measured")
    return packed


def packed_windows(cache: Cache) -> list[int]:
    """Return the indices of a cache's quantized sliding windows. Unquantized windows lose nothing."""
    return [i for i, layer in enumerate(cache.layers) if isinstance(layer, WindowLayer) and of_method(layer.spec)]


def check_observed(cache: Cache) -> None:
    """Refuse a cache that packs more than layers of full attention.

    Raises:
        UnsupportedError: its recipe packs sliding windows.
    """
    if packed_windows(cache):
        raise UnsupportedError("packed sliding windows cannot be observed here: use sliding='exact'")


@contextmanager
def observed(model: PreTrainedModel, observer: Observer, windows: Collection[int] = ()) -> Iterator[None]:
    """Context in which `observer` gets every attention call of the layers that `patch` packs.

    A tensor returned by the observer replaces the output. Unpacked layers compute as usual.

    Args:
        model: an unpatched model. It reads through Transformers' own cache, rows without padding.
        observer: called with a `Call`; returns `[B, T, Hq, Dv]` or None.
        windows: indices of sliding-window layers to observe too.

    Raises:
        UnsupportedError: the model's attention cannot be replaced, or none of its layers would be packed.
        QAttnError: the model is patched.
    """
    packed, text = _observable(model, windows), model.config.get_text_config(decoder=True)
    mixed = len(packed) < text.num_hidden_layers
    own = model_attention.check_implementation(text._attn_implementation) if mixed else None
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    token = _watch.set(Watch(observer, frozenset(packed), frozenset(windows), own))
    try:
        with attending(model, NAME, full=False):
            yield
    finally:
        _watch.reset(token)


def _mask(**kwargs: Any) -> torch.Tensor | None:
    """Return the mask of the model's attention for windows and chunks that hide tokens, else torch's mask."""
    own = _watch.get().own
    if own is not None and hides(kwargs.get("config"), kwargs.get("local_size")):
        return model_attention.mask(own, False, **kwargs)
    return sdpa_mask(**kwargs)


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
    watch, layer, out, window = _watch.get(), module.layer_idx, None, None
    if watch.own is not None and layer not in watch.packed:
        function = model_attention.function_of(watch.own, module)
        out = function(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)[0]
        if layer not in watch.windows:
            return out, None
        window = kwargs.get("sliding_window")
    refuse_arguments(module, dropout, is_causal, kwargs, "this measurement", window)
    scores = scores_of(query, scaling, kwargs)
    if out is None:
        out = stock_attention(module, query, key, value, attention_mask, scores)
    replacement = watch.observer(Call(layer, query, key, value, scores, out))
    return out if replacement is None else replacement.to(out.dtype).contiguous(), None
