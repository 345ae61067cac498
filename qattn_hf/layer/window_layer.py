"""A packed layer with a sliding window: blocks outside the window make room for new ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from qattn_hf.errors import CapacityError, UnsupportedError
from qattn_hf.layer import changes
from qattn_hf.layer.arena_holder import Writing
from qattn_hf.layer.budget_layer import BudgetLayer
from qattn_hf.layer.handle import Handle, Written
from qattn_hf.layer.latent_layer import LatentLayer
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.layer.memory_budget import BudgetLayerSpec
from qattn_hf.layer.snapshot import Mark, Restorable
from qattn_hf.model.device import capturing, compiling
from qattn_hf.model.layer_kinds import WINDOWED, WindowLayerSpec, kind_of
from qattn_kernels.layer.arena import Layout, columns_seen, rewritten_bytes
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import SHORT_CALL, LayerSpec
from qattn_kernels.layer.state import layer_tensors
from qattn_kernels.layer.step import Arena, Step
from qattn_kernels.step.operator import attend_step, beginning
from qattn_kernels.step.states import beyond_crop, drop_front, left_behind, most_left_behind, ring_blocks


class WindowLayer(QAttnLayer):
    """`QAttnLayer` with a bounded capacity: queries see the last `spec.sliding_window` tokens, or their chunk of that
    size.

    When the layer is full, it compacts in place between calls: blocks still needed move to the front. Addresses stay
    the same, so kernels and captured steps are as in any packed layer. A call longer than the layer, such as a
    prompt, runs over a larger copy, and only the last blocks are kept. Quantized values are as in a layer without
    a window.
    """

    spec: WindowLayerSpec

    def __init__(self, spec: WindowLayerSpec, max_cache_len: int | None = None, device_type: str | None = None):
        super().__init__(spec, max_cache_len, device_type)
        self.blocks = min(self.blocks, self.most)

    @property
    def most(self) -> int:
        """Largest number of blocks that the layer needs, for rows of any length."""
        return ring_blocks(self.spec.window, self.spec.sliding_window)

    @property
    def limit(self) -> int:
        """Blocks up to which the layer grows: `most`, or fewer if `max_cache_len` is smaller."""
        return self.most if self.max_cache_len is None else min(self._blocks_for(self.max_cache_len), self.most)

    def get_seq_length(self) -> torch.Tensor:
        if compiling() and self.arena is not None:
            return columns_seen(beginning(self.arena, 8))
        return super().get_seq_length()

    def reserve(self, tokens: int) -> int:
        """Make room for `tokens` more columns as in `QAttnLayer`. A call larger than the whole capacity is left to
        `attend`."""
        self.own()
        used = self._used
        if used is None or self.replayed_by_others or (used and used + tokens > self.capacity):
            used = self._used = self._slots_used()
        if used + tokens > self.capacity and self.blocks < self.limit:
            self._grow(min(changes.with_room(self._blocks_for(used + tokens)), self.limit))
        if used + tokens > self.capacity and self.is_initialized and self._behind(used):
            used = self._drop_front()
        if used + tokens <= self.capacity:
            return used
        if self.limit < self.most:
            raise CapacityError(
                f"the cache holds {self.capacity} tokens a row, {used} are taken and {tokens} more came; "
                "nothing was written. Use a larger max_cache_len, or none so that the cache grows"
            )
        if tokens <= SHORT_CALL:  # crops beyond the horizon left short blocks
            self._grow(self._blocks_for(used + tokens))
        return used

    def plan(self, tokens: int) -> None:
        """Grow to `tokens` columns in total, or to the window's need, and fix the capacity there.

        Raises:
            CapacityError: the capacity is already fixed and too small; nothing was changed.
        """
        if self.max_cache_len is not None:
            self._grow(max(self.blocks, self.limit))  # a larger horizon may have raised the limit
        if self._blocks_for(tokens) < self.most or self.limit < self.most:
            return super().plan(tokens)
        self._grow(max(self.blocks, self.most))
        self.planned = True

    def attend(
        self, query: torch.Tensor, handle: Handle, span: torch.Tensor, scores: Scores, unpadded: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Write the handle's tokens and attend to the window. Arguments and results as in `QAttnLayer`."""
        scores, tokens = scores._replace(window=self.spec.local), query.shape[2]
        if handle.written is not None:
            return super().attend(query, handle, span, scores, unpadded)
        if compiling():
            if tokens > SHORT_CALL:
                raise UnsupportedError(
                    f"a compiled call of {tokens} tokens is not supported with a packed sliding window, whose ring "
                    f"takes {SHORT_CALL}: compile decode steps alone, or use sliding='exact' with decode='eager'"
                )
        elif not capturing() and self.reserve(tokens) + tokens > self.capacity:
            return self._attend_long(query, handle, span, scores, unpadded)
        return super().attend(query, handle, span, scores, unpadded)

    def before_call(self, tokens: int) -> Restorable:
        mark = super().before_call(tokens)
        return self._all_bytes() if isinstance(mark, Mark) and mark.kept is not None else mark

    def check_crop(self, count: int) -> None:
        """Check that every row still holds the tokens that re-enter the window without its last `count` tokens.

        Raises:
            UnsupportedError: some are gone; the message says how many tokens can be removed.
        """
        spec = self.spec
        if self.is_initialized and bool(beyond_crop(self.state, spec.window, spec.sliding_window, count).any()):
            raise UnsupportedError(
                f"cannot crop {count} columns: a packed layer has {WINDOWED[kind_of(spec)]} of {spec.sliding_window}, "
                f"and tokens that re-enter it are gone; {spec.window.horizon} can be removed (crop_horizon). Crop "
                "less, or start from a fresh cache"
            )

    # Internals

    def _drop_front(self) -> int:
        """Move the blocks still needed to the front, and return the slots then used. Waits for the device.

        After a failure all blocks are in their old places.
        """
        self.check_ended()
        count = left_behind(self.state, self.spec.window, self.spec.sliding_window)
        with Writing(self, self._all_bytes()):
            drop_front(self.state, self.tensor_specs(), count)
            self._used = used = self._slots_used()
        return used

    def _all_bytes(self) -> Mark:
        """Return a mark with a copy of the whole arena, before an operation that may move blocks."""
        assert self.arena is not None
        return self.mark(bytes_too=False)._replace(kept=self.arena.clone())

    def _behind(self, tokens: int) -> int:
        """Return an upper bound of the blocks that no query of a row of `tokens` tokens sees again."""
        return most_left_behind(self.spec.window, self.spec.sliding_window, tokens)

    def _attend_long(
        self, query: torch.Tensor, handle: Handle, span: torch.Tensor, scores: Scores, unpadded: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run `attend` over a copy with room for all new tokens, and copy its last blocks back.

        The device knows the last blocks. For a first call without padding the host knows them too and does not wait.
        """
        self._check_call(query, handle)
        assert self._used is not None
        tokens, past = query.shape[2], self._blocks_for(self._used)
        first = unpadded and self._used == 0
        behind = self._behind(tokens) if first else 0
        blocks = max(self._blocks_for(self._used + tokens), behind + self.blocks)
        layout = Layout(replace(self.geometry, blocks=blocks), self.spec)
        arena: Any = self.empty(layout, self.device) if first else changes.with_blocks(self, blocks).arena
        if self.shared:  # an extra copy, because this layer's blocks will move
            before = arena[: rewritten_bytes(layout)].clone()
            handle.written = Written(arena.clone(), blocks, past, before)
        memory = Arena(arena, layout, self._layout)
        result = attend_step(Step(query, handle.key, handle.value, span, memory, scores, past))
        state = memory.state
        if first:
            used = tokens - behind * self.spec.window.block
            state["closed"].sub_(behind)
        else:
            drop_front(state, layer_tensors(*layout), left_behind(state, self.spec.window, self.spec.sliding_window))
            used = int((state["closed"] * self.spec.window.block + state["length"] - state["open_start"]).max())
            self._grow(max(self.blocks, self._blocks_for(used)))
        self.torn = True
        for name, spec in self.tensor_specs().items():
            new, dim = state[name], spec.block_dim
            self.state[name].copy_(new if dim is None else new.narrow(dim, behind, self.blocks))
        self._used = used
        self.count(0)
        self.prompt_by = self.spec.impl
        return result


def packed_layer(spec: LayerSpec, max_cache_len: int | None = None, device_type: str | None = None) -> QAttnLayer:
    """Return an empty packed layer of this spec. Arguments as in `QAttnLayer`."""
    kinds: Any = {WindowLayerSpec: WindowLayer, BudgetLayerSpec: BudgetLayer}
    kind = LatentLayer if spec.latent else kinds.get(type(spec), QAttnLayer)
    layer: QAttnLayer = kind(spec, max_cache_len, device_type)
    return layer
