"""The attention and mask functions registered with Transformers: the only way into a packed layer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from qattn_hf.attention.gradient import without_gradient
from qattn_hf.errors import UnsupportedError
from qattn_hf.layer.handle import Handle
from qattn_hf.model.device import capturing, compiling
from qattn_hf.model.latent import up_projections
from qattn_hf.model.layer_kinds import asked_window, hides
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import SHORT_CALL

UNPADDED = "_qattn_unpadded"  # attribute that `mask` sets on a mask without padding
NAME = "qattn"  # Transformers gives names with `flash`, `sdpa`, `flex_attention` or `/` a special meaning
# suffix of the name if sliding windows are packed; their layers ignore the model's window masks
WITH_WINDOWS = "_windows"

# Models build masks for windows and for bidirectional attention even if no layer uses them. `mask` returns a
# placeholder for these, and a layer that reads it is refused. The size of its last dimension gives the kind.
WINDOWED, BOTH_WAYS = 3, 4
UNREADABLE = {
    WINDOWED: "sliding windows and chunked attention are not supported here; unpatch(model)",
    BOTH_WAYS: "attention that is not causal (bidirectional, cross) is not supported; unpatch(model)",
}

BEYOND_CAUSAL = (
    "packed sequences and masks beyond causal are not supported: put each sequence in a separate row; for images whose "
    "tokens attend to each other (Gemma 3) use a stock cache, unpatch(model)"
)
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
    """Attention function of patched models: write the call's keys and values into the packed layer, then attend.

    Args:
        query: `[B, Hq, T, D]`.
        key, value: the same `Handle`, from the layer's `update`.
        attention_mask: int32 `[B or 1, 1, 1, 2]`, result of `mask`.
        scaling: softmax scale, default `1 / sqrt(D)`.

    Returns:
        `[B, T, Hq, Dv]` and None.

    Raises:
        UnsupportedError: keys or values that did not come from a packed layer, a user's 4-D mask, dropout, or an
            argument that packed attention does not support.
    """
    if (of_pages := getattr(cache_of(key, kwargs), "attend", None)) is not None:  # a `PagedCache`
        index: Any = module.layer_idx
        return of_pages(index, query, key, value, scores_of(query, scaling, kwargs)), None
    if not (isinstance(key, Handle) and key is value):
        raise UnsupportedError(
            "keys or values are not those that a packed cache returned: the model changed them, or the call went to a "
            "submodule or to another model with the same config. Call the patched model, or unpatch(model)"
        )
    if attention_mask is None or not is_span(attention_mask):
        refuse_mask(attention_mask)
        raise UnsupportedError(
            "a custom attention mask is not supported; pass a 2-D attention_mask of 0 and 1, or none"
        )
    window = asked_window(key.layer.spec)
    refuse_arguments(module, dropout, is_causal, kwargs, "a packed cache; unpatch(model) and use a stock cache", window)
    scores, span = scores_of(query, scaling, kwargs), attention_mask.reshape(-1, 2)
    short = query.shape[2] <= SHORT_CALL
    unpadded = not short and not compiling() and hasattr(attention_mask, UNPADDED)
    device = query.device
    # a device map may have put the earlier layer on another device
    if moved := key.take(getattr(module, "layer_idx", None)):
        query, span = query.to(key.key.device), span.to(key.key.device)

    def attend() -> torch.Tensor:
        if key.layer.spec.latent:
            return key.layer.attend_latents(query, key, span, scores, unpadded, up_projections(module))
        return key.layer.attend(query, key, span, scores, unpadded)[0]

    attended = without_gradient(attend, query, key.key, key.value).transpose(1, 2).contiguous()
    return attended.to(device) if moved else attended, None


def refuse_arguments(
    module: torch.nn.Module,
    dropout: float,
    is_causal: bool | None,
    kwargs: dict[str, Any],
    by_whom: str,
    window: int | None = None,
) -> None:
    """Refuse dropout, attention that is not causal, and the arguments of `REFUSED`.

    Args:
        by_whom: end of the message: which attention does not support it, and the way out.
        window: tokens of the sliding window that the layer was packed for and the model must ask for; None: no window.

    Raises:
        UnsupportedError: names the argument.
    """
    if dropout:
        raise UnsupportedError(f"dropout is not supported by {by_whom}, or use model.eval()")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise UnsupportedError(f"attention that is not causal (bidirectional, cross) is not supported by {by_whom}")
    if window is not None and kwargs.get("sliding_window") != window:
        raise UnsupportedError(
            f"this layer was packed for a sliding window of {window}, and the model's attention asks for "
            f"{kwargs.get('sliding_window')}: patch with sliding='exact' and decode='eager'"
        )
    for name, what in REFUSED.items():
        value = kwargs.get(name)
        if value is None or value is False or (name == "sliding_window" and value == window):
            continue
        if name != "sliding_window" or hides(getattr(module, "config", None), value):
            raise UnsupportedError(f"{what} is not supported by {by_whom}")


def cache_of(key: Any, kwargs: dict[str, Any]) -> Any:
    """Return the cache of a call. In continuous batching, Transformers before 5.24 passes it to the attention."""
    return key.cache if isinstance(key, Handle) else kwargs.get("cache")


def is_span(mask: Any) -> bool:
    """Return whether a mask is a result of `mask`: int32 `[B or 1, 1, 1, 2]`."""
    return isinstance(mask, torch.Tensor) and mask.dtype == torch.int32 and mask.shape[1:] == (1, 1, 2)


def refuse_mask(mask: torch.Tensor | None) -> None:
    """Refuse a placeholder of `unreadable_mask`: a layer reads a window or attends in both directions.

    Raises:
        UnsupportedError: with the reason from `UNREADABLE`.
    """
    for kind, what in UNREADABLE.items():
        if mask is not None and mask.dtype == torch.int32 and mask.shape[1:] == (1, 1, kind):
            raise UnsupportedError(what)


def unreadable(local_size: int | None, config: Any, mask_function: Any) -> int | None:
    """Return the kind of a mask that no packed layer may read, a key of `UNREADABLE`; None for a causal mask."""
    if mask_function is bidirectional_mask_function:
        return BOTH_WAYS
    return WINDOWED if local_size is not None and hides(config, local_size) else None


def unreadable_mask(kind: int, batch_size: int, device: torch.device | None) -> torch.Tensor:
    """Return an int32 placeholder `[B, 1, 1, kind]` for an unreadable mask; `refuse_mask` recognizes it."""
    return torch.zeros(batch_size, 1, 1, kind, dtype=torch.int32, device=device)


def scores_of(query: torch.Tensor, scaling: float | None, kwargs: dict[str, Any]) -> Scores:
    """Return softmax scale, soft cap and learned sinks of a call, from the arguments of the model's attention call.

    Args:
        query: `[B, Hq, T, D]`.
        scaling: softmax scale, default `1 / sqrt(D)`.
        kwargs: `softcap`, `s_aux` `[Hq]`.
    """
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
    config: Any = None,
    mask_function: Any = causal_mask_function,
    windows: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Mask function of patched models: which of the new tokens are real, and which are padding.

    It never returns None: the model would recompile when padded and unpadded batches alternate. Short calls never wait
    for the device. For windows and bidirectional attention it returns a placeholder, and `attention` refuses a layer
    that reads it.

    Args:
        attention_mask: 2-D `[B, S]`, 0 for padding, all cached tokens included; None: no padding.
        q_length: new tokens.
        q_offset: column of the first new token.
        windows: True if the model's windows are packed; their layers apply them.

    Returns:
        int32 `[B, 1, 1, 2]`: the first real column among the new tokens, and the number of real ones.

    Raises:
        UnsupportedError: packed sequences, or an `attention_mask` with fewer columns than there are new tokens.
    """
    kind = unreadable(local_size, config, mask_function)
    if kind is not None and not (windows and kind == WINDOWED):
        return unreadable_mask(kind, batch_size, device)
    if not allow_is_causal_skip and q_length > 1:
        raise UnsupportedError(BEYOND_CAUSAL)
    if attention_mask is None:
        span = torch.zeros(batch_size, 1, 1, 2, dtype=torch.int32, device=device)
        span[..., 1] = q_length
        return _marked(span, None)
    if attention_mask.shape[-1] < q_length:
        raise UnsupportedError(
            f"the attention_mask has {attention_mask.shape[-1]} columns for {q_length} new tokens; it must cover all "
            "tokens, the cached ones included"
        )
    if q_length == 1:  # every decode step: a single column has no padding before it
        # on a GPU a mask with too few columns is refused one call later, by the width check in `masks.py`
        if not isinstance(q_offset, torch.Tensor):
            q_offset = torch.full((), q_offset, device=attention_mask.device)
        column = q_offset.clamp(max=attention_mask.shape[-1] - 1).view(1)
        new = attention_mask.index_select(1, column).to(torch.int32)
        return torch.nn.functional.pad(new, (1, 0)).view(-1, 1, 1, 2)
    columns = torch.arange(q_length, device=attention_mask.device) + q_offset
    new = attention_mask.index_select(1, columns).to(torch.int32)
    span = torch.stack([new.argmax(1).to(torch.int32), new.sum(1, dtype=torch.int32)], -1).view(-1, 1, 1, 2)
    return _marked(span, new)


def _marked(span: torch.Tensor, new: torch.Tensor | None) -> torch.Tensor:
    """Mark `span` as `UNPADDED` if the new columns `[B, T]` are all real and the host may look at them.

    Only masks of prompts are read, because reading waits for the device, once per forward.
    """
    if compiling() or capturing():
        return span
    if new is not None and (new.is_meta or new.shape[1] <= SHORT_CALL):
        return span
    if new is None or bool(new.all()):
        setattr(span, UNPADDED, True)
    return span


def register(windows: bool = False) -> str:
    """Register attention and mask functions with Transformers. Return their name.

    A model is unaffected until it selects the name.

    Args:
        windows: True for a model whose sliding windows are packed.
    """
    name = NAME + WITH_WINDOWS * windows
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, functools.partial(mask, windows=windows))
    return name
