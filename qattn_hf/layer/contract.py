"""What changes of a layer, crops and KV sharing ask of it, so that they need not know the class."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import Geometry, State

Tensors = dict[str, tuple[torch.Tensor, int | None]]  # by name, with the batch dimension; None: shared by all rows


class HasRows(Protocol):
    """A layer of a cache, packed or not."""

    @property
    def batch(self) -> int | None:
        """Rows of the layer; None before its first call."""

    def with_rows(self, rows: torch.Tensor) -> Any:
        """The layer with these of its rows, int64 `[B]`, for its `take`."""


class Packed(HasRows, Protocol):
    """A packed layer: `QAttnLayer` documents each member."""

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

    def beside(self) -> Tensors: ...

    def check_ended(self) -> None: ...

    def check_crop(self, count: int) -> None: ...

    def remove(self, count: int) -> None: ...

    def reset(self) -> None: ...

    def editing(self) -> AbstractContextManager[None]: ...

    def writing(self, tokens: int) -> Any: ...
