"""Memory that a patched model keeps between calls: arenas of freed caches, and captured decode steps."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

import torch

from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.layout import Geometry

Result = TypeVar("Result")

IDLE = 2  # sets of arenas kept for reuse; the least recently used one is freed
SPARE = 32  # a set's capacity may exceed the cache's need by one part in SPARE
SIGNATURES = 40  # kinds of steps captured over one set of arenas: drafts of all lengths, and a few more


def _references(things: Iterable[Any]) -> int:
    """Return the largest reference count of these objects, including the reference from `things`."""
    return max(map(sys.getrefcount, things), default=0)


UNSHARED = _references([object()])  # count of an object that only its list refers to


class Pool:
    """Arenas and captured steps of a patched model, reused by its next call.

    Arenas are the layers of a cache, which own its tensors. When a cache is freed, its arenas become idle. The next
    cache of the same shape takes them, together with the steps captured over them. Threads may share a model: changes
    here are made under `lock`. Copies and pickles of a model start with an empty pool.

    Attributes:
        idle: sets of idle layers, the least recently used first.
        lock: also held while captured steps run, because their graphs share memory.
        steps: captured steps by the first layer of their arenas; they are freed with the arenas.
        graphs: the CUDA graphs of these steps; they never run at the same time and share one memory pool.
        refused: the reason found at run time why this model is not captured; else None.
        watched: True if a step of this model has run under `SyncWatch`.
        replays: captured steps that ran since the model last changed, by the signature of their inputs.
        parts: the model's `CompiledParts`; None before any were compiled.
        unfused: the reason found at run time why parts of this model are not compiled; else None.
    """

    def __init__(self) -> None:
        # one more than IDLE: the next cache is made before the last one is freed
        self.idle: deque[list[QAttnLayer]] = deque(maxlen=IDLE + 1)
        self.lock = threading.RLock()
        self.steps: weakref.WeakKeyDictionary[QAttnLayer, tuple[int, dict[Hashable, Any]]]
        self.steps = weakref.WeakKeyDictionary()
        self.graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.refused: str | None = None
        self.watched = False
        self.replays: Counter[Hashable] = Counter()
        self.parts: Any = None
        self.unfused: str | None = None
        self._model: Hashable = None

    def __deepcopy__(self, memo: Any) -> Pool:
        return Pool()

    def __reduce__(self) -> Any:
        return Pool, ()

    def take(self, layers: list[QAttnLayer], key_states: torch.Tensor, value_states: torch.Tensor) -> list[QAttnLayer]:
        """Return zeroed idle arenas in place of new layers, or the new layers if no idle set fits.

        If an idle set differs only in capacity, call lengths vary. The new layers then get a rounded capacity that more
        calls share.

        Args:
            layers: layers without tensors.
            key_states, value_states: `[B, Hkv, T, D]` of the first call.
        """
        shape = _shape(layers, layers[0].geometry_of(key_states, value_states), key_states.device)
        with self.lock:
            idle = []
            while self.idle:  # empty the queue first: the garbage collector may call `put` at any moment, even here
                idle.append(self.idle.popleft())
            reused = next((old for old in reversed(idle) if _fits(old, layers, shape)), None)
            varies = any(_other_length(old, layers, shape) for old in idle)
            remaining = idle[-IDLE:] if reused is None else [old for old in idle if old is not reused]
            for old in reversed(remaining):
                if len(self.idle) <= IDLE:
                    self.idle.appendleft(old)
        if reused is None:
            for layer in layers:
                layer.blocks = with_spare(layer.blocks) if varies else layer.blocks
            return layers
        for layer in reused:
            layer.reset()
        return [*reused]

    def put(self, layers: list[QAttnLayer]) -> None:
        """Keep the layers of a freed cache as idle arenas, unless a failed call left them incomplete."""
        if _whole(layers):
            self.idle.append(layers)

    def allocate(self, call: Callable[..., Result], *args: Any) -> Result:
        """Return `call(*args)`. If memory runs out, free the idle arenas and call it once more."""
        try:
            return call(*args)
        except RuntimeError as error:
            if not (_out_of_memory(error) and self.idle):
                raise
        self.idle.clear()
        return call(*args)

    def steps_of(self, layers: list[QAttnLayer]) -> dict[Hashable, Any]:
        """Return the captured steps over these layers by the signature of their inputs.

        For signatures not captured yet, the value is the number of eager runs. Steps over replaced tensors are dropped.
        """
        moves = sum([layer.moves for layer in layers])
        with self.lock:
            entry = self.steps.get(layers[0])
            if entry is None or entry[0] != moves or len(entry[1]) > SIGNATURES:
                entry = self.steps[layers[0]] = (moves, {})
        return entry[1]

    def forget(self, signature: Hashable) -> None:
        """Drop the captured steps with this signature over all layers."""
        with self.lock:
            for _, steps in self.steps.values():
                steps.pop(signature, None)

    def serve(self, model: Hashable) -> None:
        """Drop all captured steps if the model's `fingerprint` differs from the one at their capture."""
        with self.lock:
            if model != self._model:
                self._model = model
                self.steps.clear()
                self.refused, self.watched = None, False
                self.parts = self.unfused = None
                self.replays.clear()  # compiling again must pay again

    def clear(self) -> None:
        """Free the idle arenas and the captured steps."""
        self.idle.clear()
        self.serve(None)


def with_spare(blocks: int) -> int:
    """Return a capacity of at least `blocks` blocks, at most one part in `SPARE` more, that similar lengths share."""
    step = max(1, (1 << blocks.bit_length() - 1) // SPARE)
    return -(-blocks // step) * step


def _shape(layers: list[QAttnLayer], geometry: Geometry, device: torch.device) -> Hashable:
    """Return a key that is equal for layers whose tensors have the same shapes except for the capacity."""
    return tuple(layer.spec for layer in layers), layers[0].max_cache_len, replace(geometry, blocks=0), device


def _whole(layers: list[QAttnLayer]) -> bool:
    """Return whether all layers have tensors of a fixed capacity and equal batch, and no foreign
    graph writes to them."""
    complete = all(layer.is_initialized and layer.planned and not layer.replayed_by_others for layer in layers)
    return complete and len({layer.geometry.batch for layer in layers}) == 1


def _fits(old: list[QAttnLayer], layers: list[QAttnLayer], shape: Hashable) -> bool:
    """Return whether an idle set can replace new layers.

    The set must have the same shape, and the same or slightly more capacity. Nothing else may refer to it: a copy of
    its cache, a layer or a tensor.
    """
    if not _whole(old) or _shape(old, old[0].geometry, old[0].device) != shape:
        return False
    if any(not b.blocks <= a.blocks <= b.blocks + b.blocks // SPARE for a, b in zip(old, layers, strict=True)):
        return False
    # a map: a list of arenas or a local name would add a reference to each arena
    held = [(layer._state or {}).values() for layer in old] + [map(attrgetter("arena"), old)]
    return _references(old) <= UNSHARED and all(_references(tensors) <= UNSHARED for tensors in held)


def _other_length(old: list[QAttnLayer], layers: list[QAttnLayer], shape: Hashable) -> bool:
    """Return whether an idle set differs from new layers only in its capacity, and no user fixed the capacity."""
    if layers[0].max_cache_len is not None or old[0].blocks == layers[0].blocks or not _whole(old):
        return False
    return _shape(old, old[0].geometry, old[0].device) == shape


def _out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error means out of memory. On a CPU torch has no separate class for it."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
