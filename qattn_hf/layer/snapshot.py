"""Snapshots of a cache's layers, to undo a failed operation that changes them in place.

Calls of a model (`cache/interrupted.py`) and edits of a cache (`QAttnCache.crop` and others) keep a snapshot until they
end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch


class Restorable(Protocol):
    """The state of one layer before an operation."""

    def put_back(self, layer: Any) -> None:
        """Restore this state on the layer. Repeating it changes nothing."""


class Mark(NamedTuple):
    """Attributes of a layer, and the bytes that an operation may change in place.

    Attributes:
        host: all attributes of the layer, tensors included.
        kept: uint8, a copy of the first bytes of `host["arena"]`; None if the operation changes none of these bytes.
    """

    host: dict[str, Any]
    kept: torch.Tensor | None = None

    def put_back(self, layer: Any) -> None:
        if self.kept is not None:
            self.host["arena"][: self.kept.numel()].copy_(self.kept)
        layer.__dict__ = dict(self.host)  # one assignment, so an interrupt cannot split it


class Lost(NamedTuple):
    """An empty snapshot for an edit that changes the whole arena. A failure leaves the layer `torn`."""

    def put_back(self, layer: Any) -> None:
        layer.torn = True


LOST = Lost()


class Snapshot:
    """All layers of a cache and its conversation before an operation. The holder drops it when the
    operation has ended."""

    def __init__(self, marks: Sequence[Restorable]):
        self._marks = marks

    def put_back(self, parts: Sequence[Any]) -> None:
        """Restore every layer and the conversation to the state before the operation.

        A layer is left `torn` if it cannot be restored, or if layers with equal numbers of edits differ in length.
        """
        for layer, mark in zip(parts, self._marks, strict=True):
            mark.put_back(layer)
        packed = [layer for layer in parts if hasattr(layer, "arena")]
        for _, alike in groupby(sorted(packed, key=attrgetter("edits")), attrgetter("edits")):
            group = list(alike)
            torn = len({int(layer.get_seq_length()) for layer in group}) > 1
            for layer in group:
                layer.torn = layer.torn or torn
