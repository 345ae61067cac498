"""A packed layer that keeps to a number of bytes: where room runs out, its oldest blocks get fewer bits.

Blocks begin with 8 bits. The next ones are packed as before, and as many of the first ones as it takes get half the bits
of one side, values before keys: K8V8, K8V4, K4V4, K4V2, K2V2, as far as the recipe's `bits` go. When all blocks have
them, the next side follows. So a cache has blocks of two kinds at most, and loses less than one that had the fewer bits
from the start. What a call finds is what its kernels were compiled for; between calls, and seldom, arenas are replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from qattn_hf import changes
from qattn_hf.errors import CapacityError
from qattn_hf.layer import QAttnLayer, with_room
from qattn_hf.layer_kinds import BudgetLayerSpec
from qattn_hf.messages import size
from qattn_kernels.formats import Format
from qattn_kernels.layer.arena import Layout, places
from qattn_kernels.layout import Geometry

SPARE = 16  # blocks get fewer bits for a part of so many more tokens than come, so that it happens seldom


def stages(spec: BudgetLayerSpec) -> list[tuple[int, int]]:
    """Bits of keys and values from first to last: one side at a time is halved, values first."""
    k = v = 8
    found = [(k, v)]
    while (k, v) != (spec.k_bits, spec.v_bits):
        k, v = (k, v // 2) if v > spec.v_bits and (v >= k or k == spec.k_bits) else (k // 2, v)
        found.append((k, v))
    return found


def at_stage(spec: BudgetLayerSpec, stage: int, aged: int = 0) -> BudgetLayerSpec:
    """The spec with the bits of a stage, the first `aged` blocks of each row with those of the next one."""
    steps = stages(spec)
    bits, following = steps[stage], steps[min(stage + 1, len(steps) - 1)]

    def changed(fmt: Format, own: int, then: int) -> Any:
        kind: Any = fmt.core
        kind = replace(kind, bits=own, aged=None if own == then else aged)
        return replace(fmt, inner=kind) if fmt.smoothed else kind  # type: ignore[call-arg]

    k, v = (
        changed(fmt, own, then) for fmt, own, then in zip((spec.k, spec.v), bits, following, strict=True)
    )
    return replace(spec, k=k, v=v)


def place_of(spec: BudgetLayerSpec) -> tuple[int, int]:
    """Stage of a spec, and how many of a row's first blocks have the bits of the next one."""
    k, v = (fmt.core for fmt in (spec.k, spec.v))
    return stages(spec).index((k.bits, v.bits)), (k.aged or 0) + (v.aged or 0)  # type: ignore[attr-defined]


def arranged(spec: BudgetLayerSpec, geometry: Geometry, need: int, wish: int) -> tuple[BudgetLayerSpec, int]:
    """The spec with the most bits in which `need` blocks a row fit, and the capacity: as many as fit, up to `wish`.

    Raises:
        CapacityError: they do not fit in the fewest bits.
    """
    if (blocks := _most(spec, geometry, wish)) >= need:
        return spec, blocks
    for room in (need + need // SPARE + 1, need):
        for later, longest in _later(spec, room):
            if _fits(later(longest), geometry, room):
                aged = _least(lambda n, of=later: _fits(of(n), geometry, room), longest)  # type: ignore[misc]
                return later(aged), _most(later(aged), geometry, max(wish, room))
    k, v = stages(spec)[-1]
    last = at_stage(spec, len(stages(spec)) - 1)
    raise CapacityError(
        f"a row has {need * spec.window.block} tokens, and of {geometry.batch} rows {size(spec.memory)} a layer hold "
        f"{_most(last, geometry, need) * spec.window.block} in {k} bits of keys and {v} of values; nothing was written. "
        "Give more memory, fewer bits, or shorter rows"
    )


def _later(spec: BudgetLayerSpec, blocks: int) -> Iterator[tuple[Callable[[int], BudgetLayerSpec], int]]:
    """Of this stage and each later one: its spec by how many blocks have the next one's bits, and their largest number."""
    now, last = place_of(spec)[0], len(stages(spec)) - 1
    for stage in range(now, last + 1):
        yield lambda aged, stage=stage: at_stage(spec, stage, aged), blocks if stage < last else 0  # type: ignore[misc]


def _fits(spec: BudgetLayerSpec, geometry: Geometry, blocks: int) -> bool:
    return places(Layout(replace(geometry, blocks=blocks), spec))[1] <= spec.memory


def _most(spec: BudgetLayerSpec, geometry: Geometry, wish: int) -> int:
    """The most blocks up to `wish` that fit."""
    return wish if _fits(spec, geometry, wish) else _least(lambda n: not _fits(spec, geometry, n), wish) - 1


def _least(holds: Callable[[int], bool], known: int) -> int:
    """The least number from 0 on for which `holds`, as it does for `known` and for all from that least one on."""
    low, high = 0, known
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


class BudgetLayer(QAttnLayer):
    """`QAttnLayer` of at most `spec.memory` bytes. Rows of one length have the same bits, block by block, after the
    same calls; rows of a batch share the numbers of blocks."""

    spec: BudgetLayerSpec

    def __init__(self, spec: BudgetLayerSpec, max_cache_len: int | None = None, device_type: str | None = None):
        super().__init__(at_stage(spec, 0), max_cache_len, device_type)
        self._asked = 1  # blocks that the first call needs
        self._wanted = self.blocks  # capacity that the caller plans with

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate all tensors, as `QAttnLayer` does, as many as fit.

        Raises:
            CapacityError: so many tokens as were planned do not fit in the fewest bits.
        """
        geometry = self.geometry_of(key_states, value_states)
        if self.planned:
            arranged(self.spec, geometry, self._wanted, self._wanted)
        wish = max(self._wanted, self._asked)
        self.spec, self.blocks = arranged(self.spec, geometry, self._asked, wish)
        super().lazy_initialization(key_states, value_states)

    def reset(self) -> None:
        """Empty the layer, whose next blocks have 8 bits again. Tensors stay where their bits had not changed."""
        first = at_stage(self.spec, 0)
        if self.arena is not None and self.spec != first:
            arena, geometry = self._empty(first)
            self.take(changes.Change(arena, geometry, first))
        super().reset()

    def reserve(self, tokens: int) -> int:
        if not self.is_initialized:
            self._asked = max(self._asked, self._blocks_for(tokens))
        return super().reserve(tokens)

    def plan(self, tokens: int) -> None:
        """Note a capacity of `tokens` columns in total, and take as much of it as fits without fewer bits.

        Raises:
            CapacityError: `max_cache_len` is smaller, or they do not fit in the fewest bits; nothing was changed.
        """
        used = self._used = self._slots_used()
        slots = tokens + max(0, used - int(self.state["columns_seen"]))
        if self.max_cache_len is not None and slots > self.max_cache_len:
            return super().plan(tokens)
        blocks = self._blocks_for(slots)
        if self.is_initialized:
            arranged(self.spec, self.geometry, blocks, blocks)
            self._grow(max(self.blocks, _most(self.spec, self.geometry, blocks)))
        else:
            self.blocks = max(self.blocks, blocks)
        self._wanted, self.planned = max(self._wanted, blocks), True

    def with_rows(self, rows: torch.Tensor) -> changes.Change:
        """The layer with these of its rows; of more rows than before each may have fewer bits."""
        geometry = replace(self.geometry, batch=len(rows))
        spec, blocks = arranged(self.spec, geometry, self._blocks_for(self._slots_used()), self.blocks)
        if (spec, blocks) == (self.spec, self.blocks):
            return super().with_rows(rows)
        twin = copy.copy(self)
        twin.take(changes.repacked(self, spec, blocks))
        return changes.with_rows(twin, rows)

    def _extend(self, used: int, tokens: int) -> None:
        if not self.is_initialized:
            return super()._extend(used, tokens)
        if self.max_cache_len is not None and used + tokens > self._blocks_for(self.max_cache_len) * self.spec.window.block:
            return super()._extend(used, tokens)
        need = self._blocks_for(used + tokens)
        wish = max(need, self.blocks, self._wanted if self.planned else with_room(need))
        self.take(changes.repacked(self, *arranged(self.spec, self.geometry, need, wish)))

    def _empty(self, spec: BudgetLayerSpec) -> tuple[torch.Tensor, Geometry]:
        """An arena of this spec without tokens, of the capacity that is wanted or fits, and its geometry."""
        blocks = _most(spec, self.geometry, max(1, self._wanted))
        layout = Layout(replace(self.geometry, blocks=blocks), spec)
        with torch.inference_mode(False):  # else what began under inference_mode could not be written outside it
            return changes.empty_arena(layout, self.device), layout.geometry
