"""Models whose sliding window is as wide as their positions: supported up to that length, where it hides nothing."""

from __future__ import annotations

from typing import Any

from qattn_hf.cache.cache import QAttnCache
from qattn_hf.errors import UnsupportedError
from qattn_hf.model import _compat
from qattn_hf.model.layer_kinds import hides


def narrowest(config: Any) -> int | None:
    """Return the tokens of the narrowest window or chunk among the packed layers of a text config; None if none has
    one."""
    windows = (layer.window for layer in _compat.layer_types(config))
    return min((window for window in windows if window is not None and not hides(config, window)), default=None)


def check_reach(window: int, tokens: int) -> None:
    """Refuse a text with more tokens than the window shows.

    Raises:
        UnsupportedError: the text is too long; the message says what to do instead.
    """
    if tokens > window:
        raise UnsupportedError(
            f"{tokens} tokens reach beyond the model's sliding window of {window}, which is not supported yet; nothing "
            "was written. Use fewer tokens (max_new_tokens), or unpatch(model)"
        )


def check_call(window: int | None, cache: QAttnCache, tokens: int) -> None:
    """Refuse a call after which a packed cache would hold more tokens than the window shows.

    The length is read from the device only if the capacity is larger than the window.

    Raises:
        UnsupportedError: too many tokens; the message says what to do instead.
    """
    if window is not None and cache.packed[0].capacity > window:
        check_reach(window, int(cache.get_seq_length()) + tokens)


def check_compiled(window: int | None, cache: QAttnCache) -> None:
    """Refuse a compiled call if the capacity is larger than the window. A compiled call cannot read the length.

    Raises:
        UnsupportedError: the capacity is too large; the message says what to do instead.
    """
    if window is not None and (capacity := cache.packed[0].capacity) > window:
        raise UnsupportedError(
            f"a compiled call cannot tell whether it reaches beyond the model's sliding window of {window} tokens: its "
            f"cache holds {capacity}. Use a smaller max_cache_len, or call the model uncompiled"
        )
