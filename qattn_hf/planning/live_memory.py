"""Count the bytes of tensors that are alive at once while code runs, on any device including the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qattn_hf.planning.caching_allocator import ROUNDING, Block, CachingAllocator


class LiveMemory(TorchDispatchMode):
    """Counts what operations allocate and free within a `with` block.

    Tensors that existed before the block are not counted. Neither is memory that one operation allocates and frees
    internally.

    Args:
        allocator: allocator to simulate, which is told what is allocated and freed.

    Attributes:
        now: bytes alive.
        peak: the most bytes alive at once.
    """

    def __init__(self, allocator: CachingAllocator | None = None) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._allocator = allocator
        self._alive: dict[int, tuple[int, Block | None]] = {}  # bytes of each storage, by its address in C++

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {x.untyped_storage()._cdata for x in _tensors_in((*args, *(kwargs or {}).values()))}
        for x in _tensors_in((out,)):
            if x.untyped_storage()._cdata not in before:
                self._count(x.untyped_storage())
        return out

    def hold(self, n_bytes: int) -> Block | None:
        """Count a tensor of `n_bytes` that is never freed."""
        self.now += -(-n_bytes // ROUNDING) * ROUNDING
        self.peak = max(self.peak, self.now)
        return None if self._allocator is None else self._allocator.allocate(n_bytes)

    def _count(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address not in self._alive:
            before = self.now
            block = self.hold(storage.nbytes())
            self._alive[address] = self.now - before, block
            weakref.finalize(storage, self._freed, address).atexit = False

    def _freed(self, address: int) -> None:
        n_bytes, block = self._alive.pop(address)
        self.now -= n_bytes
        if self._allocator is not None and block is not None:
            self._allocator.free(block)


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments or results of an operation, which may be lists of tensors."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
