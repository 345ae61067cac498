"""Layers of a cache: packed layers, and unpacked layers that keep a state of Transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qattn_hf.layer.layer import QAttnLayer

__all__ = ["QAttnLayer"]


def __getattr__(name: str) -> Any:
    """Import `QAttnLayer` on first use."""
    if name != "QAttnLayer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from qattn_hf.layer.layer import QAttnLayer

    return QAttnLayer
