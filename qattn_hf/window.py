"""Sliding windows that hide nothing, since they show all positions that a model has: such a model is served."""

from __future__ import annotations

from typing import Any

from qattn_hf import _compat
from qattn_hf.cache import QAttnCache
from qattn_hf.errors import UnsupportedError


def hides(config: Any, window: int) -> bool:
    """Whether a window of so many tokens hides some from a model that reads to its last position."""
    positions = getattr(config, "max_position_embeddings", None)
    return positions is None or window < positions


def narrowest(config: Any) -> int | None:
    """Tokens that the narrowest window of a text config shows, None if no layer has one."""
    return min((window for window in _compat.layer_windows(config) if window is not None), default=None)


def check_reach(window: int, tokens: int) -> None:
    """Refuse more tokens than a window shows: from there on it would hide some.

    Raises:
        UnsupportedError: with what to do instead.
    """
    if tokens > window:
        raise UnsupportedError(
            f"{tokens} tokens reach beyond the model's sliding window of {window}, which is not supported yet; nothing "
            "was written. Use fewer tokens (max_new_tokens), or unpatch(model)"
        )


def check_call(window: int | None, cache: QAttnCache, tokens: int) -> None:
    """The same before a call writes `tokens` to a packed cache, which has room for them.

    A capacity within the window holds no token beyond it: only where it is larger the device is asked.
    """
    if window is not None and cache.layers[0].capacity > window:
        check_reach(window, int(cache.get_seq_length()) + tokens)


def check_compiled(window: int | None, cache: QAttnCache) -> None:
    """The same of a compiled call, which cannot ask; without a window it does not depend on the capacity."""
    if window is not None and (capacity := cache.layers[0].capacity) > window:
        raise UnsupportedError(
            f"a compiled call cannot tell whether it reaches beyond the model's sliding window of {window} tokens: its "
            f"cache holds {capacity}. Use a smaller max_cache_len, or call the model uncompiled"
        )
