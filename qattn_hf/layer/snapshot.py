"""Snapshots of layers, to undo an operation that failed, was interrupted or must not count.

| operation | snapshot |
| --- | --- |
| call of a model (`cache/interrupted.py`) | `Mark` of each layer; `rollback.Columns` for one token |
| edit of a cache (`QAttnCache.crop` and others) | `Mark` or `LOST` of each layer |
| write of one layer (`ArenaHolder.writing`), also again for layers that share keys (`kv_sharing.py`) | its `Mark` |
| capture or warm-up of a decode step (`cuda_graph/graph.py`) | `Counts` of each layer |
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
        kept: uint8, a copy of the first bytes of `host["arena"]`; None if the operation changes none of these bytes, or
            if they are zero.
        zeros: number of first bytes of `host["arena"]` that the operation changes and that were zero.
    """

    host: dict[str, Any]
    kept: torch.Tensor | None = None
    zeros: int = 0

    def put_back(self, layer: Any) -> None:
        """Restore the layer. It is left `torn` if a compiled step wrote to it, which the host cannot see."""
        if self.kept is not None:
            if layer._used is None and self.host["_used"] is not None:
                layer.torn = True
                return
            self.host["arena"][: self.kept.numel()].copy_(self.kept)
        elif self.zeros:
            self.host["arena"][: self.zeros].zero_()
        layer.__dict__ = dict(self.host)  # one assignment, so an interrupt cannot split it


class Counts(NamedTuple):
    """Attributes of a layer on the host, by name, before an operation that must not count them, such as a warm-up."""

    host: dict[str, Any]

    def put_back(self, layer: Any) -> None:
        vars(layer).update(self.host)


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
