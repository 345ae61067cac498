"""The layers of a cache: packed ones, and those that keep a state of the model itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qattn_hf.layer.layer import QAttnLayer

__all__ = ["QAttnLayer"]


def __getattr__(name: str) -> Any:
    """`QAttnLayer`, which is loaded when it is first asked for."""
    if name != "QAttnLayer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from qattn_hf.layer.layer import QAttnLayer

    return QAttnLayer
