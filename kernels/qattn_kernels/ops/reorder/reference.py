"""Reorder rows tensor by tensor: the specification of `kernel.py`."""

from __future__ import annotations

from collections.abc import Collection

import torch

Tensors = Collection[tuple[torch.Tensor, int | None]]  # each with its dimension of rows; None if all rows share it


def reorder(tensors: Tensors, rows: torch.Tensor, room: torch.Tensor) -> None:
    """Row i of every tensor becomes the old row `rows[i]`, in place.

    Args:
        rows: int `[B]`, valid row numbers.
        room: uint8 scratch memory of at least `largest_bytes(tensors)`.
    """
    for tensor, dim in tensors:
        if dim is not None and tensor.numel():
            moved = room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            tensor.copy_(torch.index_select(tensor, dim, rows, out=moved))


def largest_bytes(tensors: Tensors) -> int:
    """Bytes of the largest tensor; 0 without tensors."""
    return max((tensor.nbytes for tensor, _ in tensors), default=0)
