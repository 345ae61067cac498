"""The packed cache of a model, its memory, its calls that fail, and the report of what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qattn_hf.cache.cache import QAttnCache

__all__ = ["QAttnCache"]


def __getattr__(name: str) -> Any:
    """`QAttnCache`, which is loaded when it is first asked for."""
    if name != "QAttnCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from qattn_hf.cache.cache import QAttnCache

    return QAttnCache
