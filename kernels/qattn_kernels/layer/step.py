"""One call of a layer, as one tuple from the layer to the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from qattn_kernels.layer.arena import Layout, views
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import State


class Memory(Protocol):
    """What holds the state of a layer for one call: a layer of a cache, an arena, or rows of a page pool."""

    @property
    def spec(self) -> LayerSpec:
        """Formats and arithmetic of the layer."""

    @property
    def state(self) -> State:
        """State tensors by name. Making them takes the host as long as a short call, and a launch plan needs none."""

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The uint8 tensors that hold the state tensors. Their addresses stay the same between calls."""

    @property
    def plan_key(self) -> Any:
        """Hashable key that is equal if state tensors are in the same places of their buffers. For an arena: the text
        `Layout.encode()` and the number of blocks."""

    @property
    def table(self) -> torch.Tensor | None:
        """For a page pool, int32 `[R, NB]`, contiguous: page of each block of a row, including blocks that the call
        starts. None for an arena."""


class Step(NamedTuple):
    """One call of a layer.

    Attributes:
        query: `[B, Hq, T, D]`.
        key, value: `[B, Hkv, T, D]`.
        span: int32 `[B or 1, 2]`, first real column of the new tokens, and their count.
        memory: the layer's state, changed in place.
        scores: scale, cap, window and sinks of the scores.
        past: upper bound of the blocks that any row had closed before the call, for example the capacity.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    span: torch.Tensor
    memory: Memory
    scores: Scores
    past: int = 0


class Arena(NamedTuple):
    """`Memory` of a layer whose state is `arena`. `text`: `layout.encode()`."""

    arena: torch.Tensor
    layout: Layout
    text: str
    table: None = None

    @property
    def spec(self) -> LayerSpec:
        return self.layout.spec

    @property
    def state(self) -> State:
        return views(self.arena, self.layout)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        return (self.arena,)

    @property
    def plan_key(self) -> tuple[str, int]:
        return self.text, self.layout.geometry.blocks


class Tensors(NamedTuple):
    """`Memory` of a layer whose state tensors the caller holds. Calls on it have no launch plan."""

    state: State
    spec: LayerSpec
    table: torch.Tensor | None = None
    buffers: tuple[torch.Tensor, ...] = ()
    plan_key: None = None
