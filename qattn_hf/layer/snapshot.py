"""The state of a cache's layers before an operation that changes them in place, to be put back if the operation fails.

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
        """Give the layer that state again. A second time changes nothing."""


class Mark(NamedTuple):
    """Attributes of a layer, and the bytes that an operation may change in place.

    Attributes:
        host: all attributes of the layer, those with tensors included.
        kept: uint8, a copy of the first bytes of `host["arena"]`; None for an operation that changes none of them.
    """

    host: dict[str, Any]
    kept: torch.Tensor | None = None

    def put_back(self, layer: Any) -> None:
        if self.kept is not None:
            self.host["arena"][: self.kept.numel()].copy_(self.kept)
        layer.__dict__ = dict(self.host)  # one assignment, which no interrupt divides


class Lost(NamedTuple):
    """Nothing is kept, as of an edit that changes the whole arena: a failure leaves the layer `torn`."""

    def put_back(self, layer: Any) -> None:
        layer.torn = True


LOST = Lost()


class Snapshot:
    """All layers of a cache, and its conversation, before an operation. Its holder drops it when that has ended."""

    def __init__(self, marks: Sequence[Restorable]):
        self._marks = marks

    def put_back(self, parts: Sequence[Any]) -> None:
        """Put every layer and the conversation back to before the operation.

        A layer is left `torn` where that is impossible, and where layers with equally many edits differ in length.
        """
        for layer, mark in zip(parts, self._marks, strict=True):
            mark.put_back(layer)
        packed = [layer for layer in parts if hasattr(layer, "arena")]
        for _, alike in groupby(sorted(packed, key=attrgetter("edits")), attrgetter("edits")):
            group = list(alike)
            torn = len({int(layer.get_seq_length()) for layer in group}) > 1
            for layer in group:
                layer.torn = layer.torn or torn
