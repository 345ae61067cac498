"""The attention and mask functions registered with transformers: the only way into a packed layer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from qattn_hf.errors import UnsupportedError
from qattn_hf.handle import Handle
from qattn_kernels.online import Scores

NAME = "qattn"  # transformers treats names with `flash`, `sdpa`, `flex_attention` or `/` in a way of their own

WINDOWED = 3  # last dimension of the mask that stands for a window, which no packed layer may read

REFUSED = {
    "position_bias": "a bias on the scores",
    "cache": "continuous batching",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
    "sliding_window": "a sliding window",
    "output_attentions": "attention weights (output_attentions=True): they are never built",
    "head_mask": "a head mask",
}


def attention(
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
    """Write the call's keys and values into the packed layer and attend.

    Args:
        query: `[B, Hq, T, D]`. key, value: the same `Handle`, from the layer's `update`.
        attention_mask: int32 `[B or 1, 1, 1, 2]` of `mask`.
        scaling: of the scores, default `1 / sqrt(D)`.

    Returns:
        `[B, T, Hq, Dv]` and None.

    Raises:
        UnsupportedError: keys or values that did not come from a packed layer, a mask of one's own, dropout, or an
            argument that packed attention does not know.
    """
    if not (isinstance(key, Handle) and key is value):
        raise UnsupportedError(
            "keys or values did not come untouched from a packed cache: run the model with use_cache=True and a cache "
            "made by its patch, or unpatch(model)"
        )
    if attention_mask is not None and attention_mask.shape[1:] == (1, 1, WINDOWED):
        raise UnsupportedError("sliding windows and chunked attention are not supported yet; unpatch(model)")
    if attention_mask is None or attention_mask.dtype != torch.int32 or attention_mask.shape[1:] != (1, 1, 2):
        raise UnsupportedError(
            "an attention mask of one's own is not supported; pass a 2-D attention_mask of 0 and 1, or none"
        )
    if dropout or is_causal is False:
        raise UnsupportedError(
            "dropout and bidirectional attention are not supported by a packed cache: use model.eval()"
        )
    refuse_arguments(kwargs, "a packed cache; unpatch(model) and use a stock cache")
    scores = scores_of(query, scaling, kwargs)
    out, _ = key.layer.attend(query, key, attention_mask[:, 0, 0], scores)
    return out.transpose(1, 2).contiguous(), None


def refuse_arguments(kwargs: dict[str, Any], by_whom: str) -> None:
    """Refuse what a model asks of its attention beyond what is known here."""
    for name, what in REFUSED.items():
        value = kwargs.get(name)
        if value is not None and value is not False:
            raise UnsupportedError(f"{what} is not supported by {by_whom}")


def scores_of(query: torch.Tensor, scaling: float | None, kwargs: dict[str, Any]) -> Scores:
    """What a model asks of the scores of `query` `[B, Hq, T, D]`."""
    sinks = kwargs.get("s_aux")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return Scores(scale, float(kwargs.get("softcap") or 0.0), 0, None if sinks is None else sinks.float())


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """int32 `[B, 1, 1, 2]`: the first real column among the new tokens, and how many real ones follow.

    Never None (it would recompile where padded and unpadded batches alternate) and never a sync.

    Raises:
        UnsupportedError: packed sequences, a window, a mask of one's own, or one that is too short.
    """
    if local_size is not None:
        # models of mixed layers make this mask even where no layer reads it; one that does is refused in `attention`
        return torch.zeros(batch_size, 1, 1, WINDOWED, dtype=torch.int32, device=device)
    if not allow_is_causal_skip and q_length > 1:
        raise UnsupportedError(
            "packed sequences and masks beyond causal are not supported; give each sequence a row of its own"
        )
    if attention_mask is None:
        span = torch.zeros(batch_size, 1, 1, 2, dtype=torch.int32, device=device)
        span[..., 1] = q_length
        return span
    if attention_mask.shape[-1] < q_length:
        raise UnsupportedError(
            f"the attention_mask has {attention_mask.shape[-1]} columns for {q_length} new tokens; it must cover all "
            "tokens, the cached ones included"
        )
    columns = torch.arange(q_length, device=attention_mask.device) + q_offset
    new = attention_mask.index_select(1, columns).to(torch.int32)
    if q_length == 1:  # every decode step comes here: one column has no padding before it
        return torch.nn.functional.pad(new, (1, 0)).view(-1, 1, 1, 2)
    return torch.stack([new.argmax(1).to(torch.int32), new.sum(1, dtype=torch.int32)], -1).view(-1, 1, 1, 2)


def check_mask(attention_mask: torch.Tensor, seen: int | torch.Tensor, tokens: int) -> None:
    """Refuse a 2-D mask that has another width than `seen + tokens`, or zeros between real tokens; asks the device.

    Zeros stand on the left, or in a row's first and only call on the right.
    """
    width = int(seen) + tokens
    if attention_mask.shape[-1] != width:
        raise UnsupportedError(
            f"the attention_mask has {attention_mask.shape[-1]} columns, but the cache has seen {int(seen)} and "
            f"{tokens} come now: it must have {width}, the cached tokens included"
        )
    real = attention_mask.bool()
    runs = real[:, :1].int().sum(1) + (real[:, 1:] & ~real[:, :-1]).sum(1)
    if bool((runs > 1).any()):
        row = int((runs > 1).nonzero()[0])
        raise UnsupportedError(
            f"the attention_mask of row {row} has zeros between real tokens; a packed cache takes padding on the left, "
            "or on the right of a single call. Move the padding to the left"
        )


def register() -> str:
    """Make `NAME` known to transformers, for attention and masks, and return it; harmless until a model selects it."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    return NAME
