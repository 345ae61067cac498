"""A packed layer with a memory limit: when it is full, its oldest blocks are reduced to fewer bits."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from qattn_hf.layer import changes
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.layer.memory_budget import BudgetLayerSpec, arranged, at_stage, most_blocks
from qattn_kernels.layer.arena import Layout


class BudgetLayer(QAttnLayer):
    """`QAttnLayer` of at most `spec.memory` bytes.

    The bits of a block depend only on the row's length and the sequence of calls. All rows of a batch have the same
    number of blocks at each bit width.
    """

    spec: BudgetLayerSpec

    def __init__(self, spec: BudgetLayerSpec, max_cache_len: int | None = None, device_type: str | None = None):
        super().__init__(at_stage(spec, 0), max_cache_len, device_type)
        self._asked = 1  # blocks that the first call needs
        self._wanted = self.blocks  # capacity that the caller plans for

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate all tensors like `QAttnLayer`, with as many blocks as fit.

        Raises:
            CapacityError: the planned tokens do not fit at the fewest bits.
        """
        geometry = self.geometry_of(key_states, value_states)
        if self.planned:
            arranged(self.spec, geometry, self._wanted, self._wanted)
        wish = max(self._wanted, self._asked)
        self.spec, self.blocks = arranged(self.spec, geometry, self._asked, wish)
        super().lazy_initialization(key_states, value_states)

    def reset(self) -> None:
        """Empty the layer. Its next blocks have 8 bits again. Tensors keep their addresses if their
        bits never changed."""
        first = at_stage(self.spec, 0)
        if self.arena is not None and self.spec != first:
            blocks = most_blocks(first, self.geometry, max(1, self._wanted))
            layout = Layout(replace(self.geometry, blocks=blocks), first)
            empty = changes.Change(self.empty(layout, self.device), layout.geometry, first)
            self.torn = True
            self.take(empty)
        super().reset()

    def reserve(self, tokens: int) -> int:
        if not self.is_initialized:
            self._asked = max(self._asked, self._blocks_for(tokens))
        elif self.arena is not None and self.arena.nbytes > self.spec.memory:  # a larger horizon had used more
            self._extend(self._slots_used(), tokens)
        return super().reserve(tokens)

    def plan(self, tokens: int) -> None:
        """Plan a capacity of `tokens` columns in total, and allocate the part that fits without fewer bits.

        Raises:
            CapacityError: `max_cache_len` is smaller, or the tokens do not fit at the fewest bits; nothing was changed.
        """
        used = self._used = self._slots_used()
        slots = tokens + max(0, used - int(self.state["columns_seen"]))
        if self.max_cache_len is not None and slots > self.max_cache_len:
            return super().plan(tokens)
        blocks = self._blocks_for(slots)
        if self.is_initialized:
            arranged(self.spec, self.geometry, blocks, blocks)
            self._grow(max(self.blocks, most_blocks(self.spec, self.geometry, blocks)))
        else:
            self.blocks = max(self.blocks, blocks)
        self._wanted, self.planned = max(self._wanted, blocks), True

    def with_rows(self, rows: torch.Tensor) -> changes.Change:
        """Return a change to the rows `rows`, int64 `[B]`. If there are more rows than before, blocks may get fewer
        bits."""
        geometry = replace(self.geometry, batch=len(rows))
        spec, blocks = arranged(self.spec, geometry, max(1, self._blocks_for(self._slots_used())), self.blocks)
        if (spec, blocks) == (self.spec, self.blocks):
            return super().with_rows(rows)
        twin = copy.copy(self)
        twin.take(changes.repacked(self, spec, blocks))
        return changes.with_rows(twin, rows)

    def _extend(self, used: int, tokens: int) -> None:
        need = self._blocks_for(used + tokens)
        if not self.is_initialized or need > self._blocks_for(self.max_cache_len or used + tokens):
            return super()._extend(used, tokens)
        wish = max(need, self.blocks, self._wanted if self.planned else changes.with_room(need))
        self.take(changes.repacked(self, *arranged(self.spec, self.geometry, need, wish)))
