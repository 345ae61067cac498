"""The packed cache of a model: its memory, recovery from failed calls, and the report of its content."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qattn_hf.cache.cache import QAttnCache

__all__ = ["QAttnCache"]


def __getattr__(name: str) -> Any:
    """Import `QAttnCache` on first use."""
    if name != "QAttnCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from qattn_hf.cache.cache import QAttnCache

    return QAttnCache
