"""Attention over transformers' own caches: long calls are ours, short ones are torch's, nothing is packed."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from qattn_hf.attention import (
    NAME,
    WINDOWED,
    refuse_arguments,
    refuse_mask,
    scores_of,
    unreadable,
    unreadable_mask,
)
from qattn_hf.errors import UnsupportedError
from qattn_hf.gradient import without_gradient
from qattn_hf.handle import Handle
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import SHORT_CALL, LayerSpec
from qattn_kernels.step.stock_cache import over

STEPS = f"calls of at most {SHORT_CALL} tokens are attended in the model's precision, since nothing is packed"


def attention(
    spec: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over all that the model's cache holds.

    Args:
        spec: `LayerSpec.encode()`.
        query: `[B, Hq, T, D]`. key, value: `[B, Hkv, S, D]`, a static cache's whole capacity.
        attention_mask: of `mask`.
        scaling: of the scores, default `1 / sqrt(D)`.

    Returns:
        `[B, T, Hq, Dv]` and None.

    Raises:
        UnsupportedError: a packed cache, a mask of one's own, a window that hides tokens, dropout, or an argument that
            is not known here.
    """
    _refuse(key, attention_mask)
    refuse_arguments(module, dropout, is_causal, kwargs, "this attention; unpatch(model)")
    scores = scores_of(query, scaling, kwargs)
    if query.shape[2] > SHORT_CALL:
        key_mask, offset = _unpacked(attention_mask, query, key)
        sizes = scores.scale, scores.softcap, scores.window, scores.sinks
        long = functools.partial(over, query, key, value, key_mask, offset, spec, *sizes)
        out = without_gradient(lambda: long()[0], query, key, value)
        return out.transpose(1, 2).contiguous(), None
    return stock_attention(module, query, key, value, attention_mask, scores), None


def stock_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scores: Scores,
) -> torch.Tensor:
    """Attention in the model's precision, `[B, T, Hq, Dv]`; `mask` is transformers' own for torch's attention."""
    if scores.softcap or scores.sinks is not None:  # torch's own has neither
        return _plain(query, key, value, mask, scores).transpose(1, 2).contiguous()
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scores.scale)[0]


def _refuse(key: Any, mask: torch.Tensor | None) -> None:
    if isinstance(key, Handle):
        raise UnsupportedError(
            "this model was patched with cache='model', which reads transformers' own caches, not a QAttnCache: pass a "
            "DynamicCache, a StaticCache or none, or patch with cache='quantized'"
        )
    refuse_mask(mask)


def _unpacked(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The key mask `[B, S]` and the column of the first query `[B]` of a long call."""
    if mask is None or mask.dtype != torch.int32 or mask.shape != (query.shape[0], 1, 1, 1 + key.shape[2]):
        raise UnsupportedError(
            "an attention mask of one's own is not supported; pass a 2-D attention_mask of 0 and 1, or none"
        )
    return mask[:, 0, 0, 1:] != 0, mask[:, 0, 0, 0]


def _plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scores: Scores
) -> torch.Tensor:
    """Softcap and learned sinks, `[B, Hq, T, Dv]`: plain PyTorch that builds the weights, the softmax in fp32.

    Args:
        mask: bool `[B, 1, T, S]`; None where all is causal over the first columns, as torch's own takes it.
    """
    tokens = query.shape[2]
    if mask is None and tokens > 1:  # a static cache's other columns are not filled yet
        key, value = key[:, :, :tokens], value[:, :, :tokens]
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype != torch.bool:
        raise UnsupportedError("an attention mask of one's own is not supported; pass a 2-D attention_mask of 0 and 1")
    key, value = (repeat_kv(x, query.shape[1] // x.shape[1]) for x in (key, value))
    s = (query @ key.mT).float() * scores.scale
    s = scores.softcap * torch.tanh(s / scores.softcap) if scores.softcap else s
    # finite, so that padding, which sees nothing, stays a number
    s = s if mask is None else s.masked_fill(~mask, torch.finfo(torch.float32).min)
    if scores.sinks is not None:
        s = torch.cat([s, scores.sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    return s.softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    config: Any = None,
    mask_function: Any = causal_mask_function,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Of a long call int32 `[B, 1, 1, 1 + S]`: the column of the first query, then 1 for columns that hold a token and
    0 for others, in any order; never a sync. Of a short call what transformers gives torch's attention.

    Raises:
        UnsupportedError: packed sequences, a mask of one's own, or one that is too short.
    """
    kind = unreadable(local_size, config, mask_function)
    if kind is not None:
        return unreadable_mask(kind, batch_size, device)
    if not allow_is_causal_skip and q_length > 1:
        raise UnsupportedError(
            "packed sequences and masks beyond causal are not supported; give each sequence a row of its own"
        )
    if q_length <= SHORT_CALL:
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, attention_mask=attention_mask, device=device,
            allow_is_causal_skip=allow_is_causal_skip, local_size=local_size, mask_function=mask_function, **kwargs,
        )  # fmt: skip
    if local_size is not None and kv_length > local_size:
        return unreadable_mask(WINDOWED, batch_size, device)
    made = torch.ones(batch_size, 1 + kv_length, dtype=torch.int32, device=device)
    if attention_mask is not None:
        seen = q_offset if isinstance(q_offset, int) else 0  # of a static cache the device alone knows
        if attention_mask.shape[-1] < seen + q_length:
            raise UnsupportedError(
                f"the attention_mask has {attention_mask.shape[-1]} columns for {seen} cached and {q_length} new "
                "tokens; it must cover all of them"
            )
        known = attention_mask[:, :kv_length].to(torch.int32)
        made[:, 1:] = torch.nn.functional.pad(known, (0, kv_length - known.shape[1]))
    made[:, 0] = q_offset
    return made[:, None, None]


def register(spec: LayerSpec) -> str:
    """Make attention by `spec` known to transformers and return its name; harmless until a model selects it."""
    text = spec.encode()
    name = f"{NAME}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    AttentionInterface.register(name, functools.partial(attention, text))
    AttentionMaskInterface.register(name, mask)
    return name
