"""Memory of a patched model that outlives a call: arenas that no cache uses any more, and captured steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from qattn_hf.layer import QAttnLayer
from qattn_kernels.layout import Geometry

Result = TypeVar("Result")

IDLE = 2  # sets of arenas that wait for their next use; the least recently used one goes
SIGNATURES = 8  # kinds of steps captured over one set of arenas


class Pool:
    """Arenas are the layers of a cache, which own its tensors. They wait here from the death of one cache, when nobody
    can see them change any more, to the birth of the next one of the same shape, and bring their captured steps.

    Copies and pickles of a model start with an empty pool.

    Attributes:
        steps: the captured steps by the first layer of the arenas they read and write, so that they die with it.
        graphs: the CUDA graphs of these steps; they never run at the same time and share one memory pool.
        refused: why this model is not captured, found out while it ran.
        watched: whether a step of this model has been watched for waits on the device.
    """

    def __init__(self) -> None:
        self.idle: list[tuple[Hashable, list[QAttnLayer]]] = []
        self.steps: weakref.WeakKeyDictionary[QAttnLayer, tuple[int, dict[Hashable, Any]]]
        self.steps = weakref.WeakKeyDictionary()
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.refused: str | None = None
        self.watched = False
        self._model: Hashable = None

    def __deepcopy__(self, memo: Any) -> Pool:
        return Pool()

    def __reduce__(self) -> Any:
        return Pool, ()

    def take(self, layers: list[QAttnLayer], key_states: torch.Tensor, value_states: torch.Tensor) -> list[QAttnLayer]:
        """Zeroed arenas in place of these new layers, for `[B, Hkv, T, D]` keys and values; the same if none fit."""
        key = _key(layers, layers[0].geometry_of(key_states, value_states), key_states.device)
        for i in reversed(range(len(self.idle))):
            if self.idle[i][0] == key:
                found = self.idle.pop(i)[1]
                for layer in found:
                    layer.reset()
                return found
        del self.idle[:-IDLE]
        return layers

    def put(self, layers: list[QAttnLayer]) -> None:
        """Keep the arenas of a cache that is gone; those that a failed call left half made are let go."""
        if not all(layer.is_initialized and layer.planned for layer in layers):
            return
        if len({layer.geometry.batch for layer in layers}) == 1:
            self.idle.append((_key(layers, layers[0].geometry, layers[0].device), layers))
            del self.idle[: -IDLE - 1]  # one more until the next cache, which is made after the last one is let go

    def allocate(self, call: Callable[..., Result], *args: Any) -> Result:
        """`call(*args)`, once more without the idle arenas if memory runs out."""
        try:
            return call(*args)
        except torch.OutOfMemoryError:
            if not self.idle:
                raise
        self.idle.clear()
        return call(*args)

    def steps_of(self, layers: list[QAttnLayer]) -> dict[Hashable, Any]:
        """Captured steps by the signature of their inputs; None stands for a step that ran once and can be captured.

        Steps over tensors that were replaced since are dropped.
        """
        moves = sum([layer.moves for layer in layers])
        entry = self.steps.get(layers[0])
        if entry is None or entry[0] != moves or len(entry[1]) > SIGNATURES:
            entry = self.steps[layers[0]] = (moves, {})
        return entry[1]

    def serve(self, model: Hashable) -> None:
        """Drop all captured steps, and what was found out, unless the model is the one they were captured of."""
        if model != self._model:
            self._model = model
            self.steps.clear()
            self.refused, self.watched = None, False

    def clear(self) -> None:
        """Let go of everything."""
        self.idle.clear()
        self.serve(None)


def _key(layers: list[QAttnLayer], geometry: Geometry, device: torch.device) -> Hashable:
    """All that fixes the shape of every tensor; layers of one model differ in heads and dims always in the same way."""
    blocks = tuple(layer.blocks for layer in layers)  # layers of other windows have others for the same capacity
    return tuple(layer.spec for layer in layers), blocks, layers[0].max_cache_len, geometry, device
