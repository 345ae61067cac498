"""Bytes of tensors that are alive at once, counted while code runs: on any device, the meta device too."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROUNDING = 512  # bytes; PyTorch's allocator on a GPU gives out multiples of it


class LiveMemory(TorchDispatchMode):
    """Counts what operations allocate inside of this context, and what of it is freed again.

    What existed before is not counted, nor what one operation allocates and frees by itself.

    Attributes:
        now: bytes alive. peak: the most there were at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, int] = {}  # bytes of each storage, by its address in C++
        self._held: list[Any] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in before:
                self._count(x.untyped_storage())
        if self._held is not None:
            self._held.append(out)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address not in self._alive:
            self._alive[address] = -(-storage.nbytes() // ROUNDING) * ROUNDING
            self.now += self._alive[address]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, address).atexit = False

    def _freed(self, address: int) -> None:
        self.now -= self._alive.pop(address)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Context in which nothing is freed before its end."""
        self._held = []
        try:
            yield
        finally:
            self._held = None
