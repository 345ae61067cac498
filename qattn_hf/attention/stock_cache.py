"""Attention over Transformers' own caches (`cache="model"`): quantized in long calls, torch's in short ones."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from qattn_hf.attention.attention import (
    BEYOND_CAUSAL,
    NAME,
    WINDOWED,
    refuse_arguments,
    refuse_mask,
    scores_of,
    unreadable,
    unreadable_mask,
)
from qattn_hf.attention.gradient import without_gradient
from qattn_hf.errors import UnsupportedError
from qattn_hf.layer.handle import Handle
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import SHORT_CALL, LayerSpec
from qattn_kernels.step.stock_cache import over

STEPS = f"calls of at most {SHORT_CALL} tokens attend in full precision, because nothing is packed"


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
    """Attention function over a stock cache: quantized if the call has more than `SHORT_CALL` tokens, else torch's.

    Args:
        spec: `LayerSpec.encode()`.
        query: `[B, Hq, T, D]`.
        key, value: `[B, Hkv, S, D]`; for a static cache, S is the whole capacity.
        attention_mask: result of this module's `mask`.
        scaling: softmax scale, default `1 / sqrt(D)`.

    Returns:
        `[B, T, Hq, Dv]` and None.

    Raises:
        UnsupportedError: a packed cache, a user's 4-D mask, a window that hides tokens, dropout, or an argument that is
            not supported.
    """
    _refuse(key, attention_mask)
    refuse_arguments(module, dropout, is_causal, kwargs, "this attention; unpatch(model)")
    scores = scores_of(query, scaling, kwargs)
    if query.shape[2] > SHORT_CALL:
        key_mask, offset = _split_mask(attention_mask, query, key)
        sizes = scores.scale, scores.softcap, scores.window, scores.sinks
        quantized = functools.partial(over, query, key, value, key_mask, offset, spec, *sizes)
        out = without_gradient(lambda: quantized()[0], query, key, value)
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
    """Compute attention in bf16 or fp16, with torch's function if possible.

    Args:
        query: `[B, Hq, T, D]`.
        key, value: `[B, Hkv, S, D]`.
        mask: bool `[B, 1, T, S]`, or None for a causal call over the first columns.

    Returns:
        `[B, T, Hq, Dv]`.
    """
    if scores.softcap or scores.sinks is not None:  # torch's attention supports neither
        return _eager_attention(query, key, value, mask, scores).transpose(1, 2).contiguous()
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scores.scale)[0]


def _refuse(key: Any, mask: torch.Tensor | None) -> None:
    if isinstance(key, Handle):
        raise UnsupportedError(
            "this model was patched with cache='model', which reads transformers' own caches, not a QAttnCache: pass a "
            "DynamicCache, a StaticCache or none, or patch with cache='quantized'"
        )
    refuse_mask(mask)


def _split_mask(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the mask of a long call into a key mask, bool `[B, S]`, and the column of the first query, `[B]`."""
    if mask is None or mask.dtype != torch.int32 or mask.shape != (query.shape[0], 1, 1, 1 + key.shape[2]):
        raise UnsupportedError(
            "a custom attention mask is not supported; pass a 2-D attention_mask of 0 and 1, or none"
        )
    return mask[:, 0, 0, 1:] != 0, mask[:, 0, 0, 0]


def _eager_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scores: Scores
) -> torch.Tensor:
    """Compute attention with soft cap and learned sinks in plain PyTorch. The softmax is in fp32. Returns `[B, Hq, T,
    Dv]`.

    Args:
        mask: bool `[B, 1, T, S]`, or None for a causal call over the first columns.
    """
    tokens = query.shape[2]
    if mask is None and tokens > 1:  # other columns of a static cache are not filled yet
        key, value = key[:, :, :tokens], value[:, :, :tokens]
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype != torch.bool:
        raise UnsupportedError("a custom attention mask is not supported; pass a 2-D attention_mask of 0 and 1")
    key, value = (repeat_kv(x, query.shape[1] // x.shape[1]) for x in (key, value))
    s = (query @ key.mT).float() * scores.scale
    s = scores.softcap * torch.tanh(s / scores.softcap) if scores.softcap else s
    # finite, so that a padding row without a visible key is not NaN
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
    """Mask function over a stock cache; never waits for the device.

    Returns:
        for a call of more than `SHORT_CALL` tokens int32 `[B, 1, 1, 1 + S]`: the column of the first query, then 1 for
        each column with a real token and 0 for others. For a shorter call, the mask of torch's attention.

    Raises:
        UnsupportedError: packed sequences, or an `attention_mask` with too few columns.
    """
    kind = unreadable(local_size, config, mask_function)
    if kind is not None:
        return unreadable_mask(kind, batch_size, device)
    if not allow_is_causal_skip and q_length > 1:
        raise UnsupportedError(BEYOND_CAUSAL)
    if q_length <= SHORT_CALL:
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, attention_mask=attention_mask, device=device,
            allow_is_causal_skip=allow_is_causal_skip, local_size=local_size, mask_function=mask_function, **kwargs,
        )  # fmt: skip
    if local_size is not None and kv_length > local_size:
        return unreadable_mask(WINDOWED, batch_size, device)
    columns = torch.ones(batch_size, 1 + kv_length, dtype=torch.int32, device=device)
    if attention_mask is not None:
        cached = q_offset if isinstance(q_offset, int) else 0  # for a static cache only the device knows the offset
        if attention_mask.shape[-1] < cached + q_length:
            raise UnsupportedError(
                f"the attention_mask has {attention_mask.shape[-1]} columns for {cached} cached and {q_length} new "
                "tokens; it must cover all of them"
            )
        known = attention_mask[:, :kv_length].to(torch.int32)
        columns[:, 1:] = torch.nn.functional.pad(known, (0, kv_length - known.shape[1]))
    columns[:, 0] = q_offset
    return columns[:, None, None]


def register(spec: LayerSpec) -> str:
    """Register attention with `spec` with Transformers. Return its name, for a model to select."""
    text = spec.encode()
    name = f"{NAME}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    AttentionInterface.register(name, functools.partial(attention, text))
    AttentionMaskInterface.register(name, mask)
    return name
