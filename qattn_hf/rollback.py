"""Tokens taken back from the end of a layer, as after a rejected draft."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qattn_hf.errors import UnsupportedError

if TYPE_CHECKING:
    from qattn_hf.layer import QAttnLayer


def columns(layer: QAttnLayer) -> tuple[int, int]:
    """Columns that a layer was fed, padding included, and those up to the last padding; waits for the device."""
    seen, padded = torch.stack([layer.state["columns_seen"], layer.state["padded"]]).tolist()
    return seen, padded


def crop(layer: QAttnLayer, count: int, held: tuple[int, int] | None = None) -> None:
    """Remove tokens from the end of every row of a layer: -n the last n; n > 0 all but the first n columns.

    Args:
        held: the layer's `columns`, where the caller knows them.

    Raises:
        UnsupportedError: if a removed column belongs to a call that had padding; nothing was changed.
    """
    seen, padded = columns(layer) if held is None else held
    drop = min(-count, seen) if count < 0 else max(0, seen - count)
    if drop == 0:
        return
    if drop == seen:
        return layer.reset()
    if seen - drop < padded:
        raise UnsupportedError(
            f"cannot crop {drop} columns: some are padding or stand before padding, where columns do not map to "
            "tokens of a row. Crop less, or start from a fresh cache"
        )
    layer.check_crop(drop)
    layer.remove(drop)
