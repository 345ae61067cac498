"""Memory of a patched model that outlives a call: arenas that no cache uses any more, and captured steps."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from qattn_hf.layer import QAttnLayer
from qattn_kernels.layout import Geometry

Result = TypeVar("Result")

IDLE = 2  # sets of arenas that wait for their next use; the least recently used one goes
SPARE = 0.03  # a waiting set may have that much more capacity than the next cache needs
SIGNATURES = 8  # kinds of steps captured over one set of arenas


def _references(things: Iterable[Any]) -> int:
    """The most references that one of these objects has, its place in `things` included."""
    return max(map(sys.getrefcount, things))


ALONE = _references([object()])


class Pool:
    """Arenas are the layers of a cache, which own its tensors. They wait here from the death of one cache, when nobody
    can see them change any more, to the birth of the next one of the same shape, and bring their captured steps.

    Threads may share a model: what they change here they change under `lock`. Copies and pickles of a model start with
    an empty pool.

    Attributes:
        idle: sets of layers that wait, the last one used last.
        lock: held while captured steps run, too, since these share memory for what they compute.
        steps: the captured steps by the first layer of the arenas they read and write, so that they die with it.
        graphs: the CUDA graphs of these steps; they never run at the same time and share one memory pool.
        refused: why this model is not captured, found out while it ran.
        watched: whether a step of this model has been watched for waits on the device.
    """

    def __init__(self) -> None:
        # one more than stay: the next cache is made before the last one is let go
        self.idle: deque[list[QAttnLayer]] = deque(maxlen=IDLE + 1)
        self.lock = threading.RLock()
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
        shape = _shape(layers, layers[0].geometry_of(key_states, value_states), key_states.device)
        with self.lock:
            waiting = []
            while self.idle:  # emptied, since the garbage collector may call `put` at any moment, in here too
                waiting.append(self.idle.popleft())
            found = next((old for old in reversed(waiting) if _serves(old, layers, shape)), None)
            stay = waiting[-IDLE:] if found is None else [old for old in waiting if old is not found]
            for old in reversed(stay):
                if len(self.idle) <= IDLE:
                    self.idle.appendleft(old)
        for layer in found or ():
            layer.reset()
        return layers if found is None else [*found]

    def put(self, layers: list[QAttnLayer]) -> None:
        """Keep the arenas of a cache that is gone; those that a failed call left half made are let go."""
        if _whole(layers):
            self.idle.append(layers)

    def allocate(self, call: Callable[..., Result], *args: Any) -> Result:
        """`call(*args)`, once more without the idle arenas if memory runs out."""
        try:
            return call(*args)
        except RuntimeError as error:
            if not (_out_of_memory(error) and self.idle):
                raise
        self.idle.clear()
        return call(*args)

    def steps_of(self, layers: list[QAttnLayer]) -> dict[Hashable, Any]:
        """Captured steps by the signature of their inputs; None stands for a step that ran once and can be captured.

        Steps over tensors that were replaced since are dropped.
        """
        moves = sum([layer.moves for layer in layers])
        with self.lock:
            entry = self.steps.get(layers[0])
            if entry is None or entry[0] != moves or len(entry[1]) > SIGNATURES:
                entry = self.steps[layers[0]] = (moves, {})
        return entry[1]

    def serve(self, model: Hashable) -> None:
        """Drop all captured steps, and what was found out, unless the model is the one they were captured of."""
        with self.lock:
            if model != self._model:
                self._model = model
                self.steps.clear()
                self.refused, self.watched = None, False

    def clear(self) -> None:
        """Let go of everything."""
        self.idle.clear()
        self.serve(None)


def _shape(layers: list[QAttnLayer], geometry: Geometry, device: torch.device) -> Hashable:
    """All but the capacity that fixes the shape of every tensor; layers of one model differ in heads and dims always in
    the same way."""
    return tuple(layer.spec for layer in layers), layers[0].max_cache_len, replace(geometry, blocks=0), device


def _whole(layers: list[QAttnLayer]) -> bool:
    """Whether all layers have tensors that only this package writes, of a capacity that stays, for as many rows."""
    made = all(layer.is_initialized and layer.planned and not layer.replayed_by_others for layer in layers)
    return made and len({layer.geometry.batch for layer in layers}) == 1


def _serves(old: list[QAttnLayer], layers: list[QAttnLayer], shape: Hashable) -> bool:
    """Whether a waiting set can stand for new layers: nobody else holds it (a copy of its cache, a layer, a tensor), it
    has their shape, and their capacity or little more."""
    if not _whole(old) or _shape(old, old[0].geometry, old[0].device) != shape:
        return False
    if any(not b.blocks <= a.blocks <= b.blocks * (1 + SPARE) for a, b in zip(old, layers, strict=True)):
        return False
    return _references(old) <= ALONE and all(_references(layer.state.values()) <= ALONE for layer in old)


def _out_of_memory(error: RuntimeError) -> bool:
    """On a CPU torch has no error of its own for that."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
