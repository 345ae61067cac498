"""Remove tokens from the end of a layer, for example after a rejected draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from qattn_hf.errors import UnsupportedError
from qattn_hf.layer.contract import Packed
from qattn_hf.layer.model_layer import ModelLayer


def columns(layer: Packed) -> tuple[int, int]:
    """Return the number of columns fed to a layer, padding included, and the number up to its last padding column.

    Waits for the device."""
    seen, padded = torch.stack([layer.state["columns_seen"], layer.state["padded"]]).tolist()
    return seen, padded


class Columns(NamedTuple):
    """A packed layer before a call of one token. Nothing is copied: a crop removes the token bit for bit.

    Attributes:
        host: attributes that the call changes.
    """

    host: dict[str, Any]

    def put_back(self, layer: Any) -> None:
        """Remove the columns that came since, each from a separate call. The layer is left `torn` if one was padding,
        if a compiled step wrote to it, or if its kernel launches were interrupted."""
        count = layer.edits - self.host["edits"]
        if layer.torn or layer._used is None or _pads(layer, count):
            layer.torn = True
            return
        layer.own()
        layer.torn = True  # until the attributes are set: the number of columns to remove is known only once
        if count:
            layer.cut(count)
        vars(layer).update(self.host)


def _pads(layer: Packed, count: int) -> bool:
    """Return whether one of the last `count` columns of a layer is padding or comes before padding."""
    seen, padded = columns(layer)
    return seen - count < padded


class Crop(NamedTuple):
    """Columns that a crop removes from a layer, and columns that remain."""

    drop: int
    left: int

    @property
    def empties(self) -> bool:
        """Whether the crop removes all columns of a non-empty layer."""
        return self.drop > 0 == self.left


def plan_layer(layer: Packed, count: int, known: tuple[int, int] | None = None) -> Crop:
    """Plan a crop of a packed layer: -n removes the last n columns of every row; n > 0 keeps the first n columns.

    Args:
        known: the layer's `columns`, if the caller knows them.

    Raises:
        UnsupportedError: a removed column belongs to a call with padding; the earlier state cannot be restored; or an
            earlier edit was interrupted. In all cases nothing was changed.
    """
    layer.check_ended()
    if not layer.is_initialized:
        return Crop(0, 0)
    seen, padded = columns(layer) if known is None else known
    plan = _plan(seen, count)
    if plan.drop and plan.left:
        if plan.left < padded:
            raise UnsupportedError(
                f"cannot crop {plan.drop} columns: some are padding or come before padding or before `keep`, where "
                "columns do not map to tokens of a row. Crop less, or start from a fresh cache"
            )
        layer.check_crop(plan.drop)
    return plan


def plan_cache(layers: Sequence[Packed | ModelLayer], count: int, seen: int) -> list[Crop]:
    """Plan a crop of all layers of a cache, as `plan_layer` does for one.

    Args:
        seen: columns fed to the cache, used only for unpacked layers.
    """
    packed = [layer for layer in layers if not isinstance(layer, ModelLayer)]
    known = columns(packed[0]) if len({layer.edits for layer in packed}) == 1 and packed[0].is_initialized else None
    plans = []
    for layer in layers:
        if isinstance(layer, ModelLayer):
            plan = _plan(seen, count)
            if plan.drop and plan.left:
                layer.check_crop(plan.drop)
        else:
            plan = plan_layer(layer, count, known)
        plans.append(plan)
    return plans


def _plan(seen: int, count: int) -> Crop:
    drop = min(-count, seen) if count < 0 else max(0, seen - count)
    return Crop(drop, seen - drop)


def crop(layer: Packed | ModelLayer, plan: Crop) -> None:
    """Remove the columns of a plan from a layer."""
    if plan.empties:
        layer.reset()
    elif isinstance(layer, ModelLayer):
        layer.crop(-plan.drop)
    elif plan.drop:
        layer.remove(plan.drop)
