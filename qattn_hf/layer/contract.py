"""Interfaces of a layer for changes, crops and KV sharing, independent of the layer's class."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import Geometry, State

# tensor and batch dimension by name; a batch dimension of None means shared by all rows
Tensors = dict[str, tuple[torch.Tensor, int | None]]


class HasRows(Protocol):
    """A layer of a cache, packed or not."""

    @property
    def batch(self) -> int | None:
        """Rows of the layer; None before its first call."""

    def with_rows(self, rows: torch.Tensor) -> Any:
        """Return the layer's change to the rows `rows`, int64 `[B]`, for `take`."""


class Packed(HasRows, Protocol):
    """A packed layer. `QAttnLayer` documents each member."""

    spec: LayerSpec
    geometry: Geometry
    device: Any
    arena: torch.Tensor | None
    blocks: int
    edits: int
    is_initialized: Any
    _layout: str

    @property
    def state(self) -> State: ...

    def state_tensors(self) -> Tensors: ...

    def outside_arena(self) -> Tensors: ...

    def check_ended(self) -> None: ...

    def check_crop(self, count: int) -> None: ...

    def remove(self, count: int) -> None: ...

    def reset(self) -> None: ...

    def editing(self) -> AbstractContextManager[None]: ...

    def writing(self, tokens: int) -> Any: ...
