"""Check that each address a kernel computes lies inside a tensor of its launch, as compute-sanitizer's memcheck does.

Triton's interpreter reads and writes any address. An access outside the tensors hits foreign memory, and the process
crashes much later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


class Bounds:
    """First bytes and ends of the memory that the tensors of a launch cover, in order and without overlap."""

    def __init__(self, kernel: str, tensors: Iterator[torch.Tensor]):
        self.kernel = kernel
        starts: list[int] = []
        ends: list[int] = []
        for start, end in sorted(extent(tensor) for tensor in tensors if tensor.numel()):
            if ends and start <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                starts.append(start)
                ends.append(end)
        self.starts = np.array(starts, np.uint64)
        self.ends = np.array(ends, np.uint64)

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        """Raises IndexError for an address outside; `pointers` and `mask` are the interpreter's handles."""
        element = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses, kept = np.broadcast_arrays(pointers.data, True if mask is None else mask.data.astype(bool))
        addresses = addresses[kept].astype(np.uint64)
        if not addresses.size:
            return
        below = np.searchsorted(self.starts, addresses, side="right")
        inside = (below > 0) & (addresses + np.uint64(element) <= self.ends[np.maximum(below, 1) - 1])
        if not inside.all():
            raise IndexError(f"{self.kernel} {what} {(~inside).sum()} elements outside of the tensors it was given")


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor and the end of its last element.

    For a tensor of one element, which a launch plan uses as a pointer, return the extent of the memory that it views.
    """
    if tensor.numel() == 1:
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def tensors_in(arguments: Any) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, tuple):
            yield from tensors_in(argument)


def install(launches: list[str]) -> None:
    """From now on interpreted kernels are checked, and their names added to `launches`."""
    interpret = GridExecutor.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    add = InterpreterBuilder.create_atomic_rmw
    of_launch: list[Bounds] = []

    def checked_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        launches.append(self.fn.__name__)
        of_launch.append(Bounds(self.fn.__name__, tensors_in((*args, *kwargs.values()))))
        try:
            interpret(self, *args, **kwargs)
        finally:
            of_launch.pop()

    def checked_load(self: Any, ptrs: Any, mask: Any, *args: Any) -> Any:
        of_launch[-1].check("reads", ptrs, mask)
        return load(self, ptrs, mask, *args)

    def checked_store(self: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
        of_launch[-1].check("writes", ptrs, mask)
        return store(self, ptrs, value, mask, *args)

    def checked_add(self: Any, operation: Any, ptrs: Any, value: Any, mask: Any, *args: Any) -> Any:
        of_launch[-1].check("adds to", ptrs, mask)
        return add(self, operation, ptrs, value, mask, *args)

    GridExecutor.__call__ = checked_launch
    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = checked_load, checked_store
    InterpreterBuilder.create_atomic_rmw = checked_add
