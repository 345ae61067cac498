"""Changes that replace a layer's tensors: other rows, a larger ring, more blocks, fewer bits.

A change is computed in full (`Change`) before `QAttnLayer.take` applies it, and `take` cannot fail. A cache computes
the changes of all layers first. If memory runs out or an argument is wrong, every layer is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from qattn_hf.errors import QAttnError
from qattn_hf.layer.contract import HasRows, Packed
from qattn_kernels.layer.arena import Layout, empty_arena, places, views
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import layer_tensors
from qattn_kernels.layout import Geometry, State, TensorSpec, copy_blocks
from qattn_kernels.step.states import Tensors, largest_bytes, reorder_arena, reorder_tensors, repack, resized_ring


def with_room(blocks: int) -> int:
    """Return the capacity, in blocks, of a growing layer that must hold `blocks`: at most a quarter more.

    Capacities are multiples of a quarter of a power of two. A cache that grows token by token is thus copied rarely.
    """
    quarter = max(1, 1 << max(0, (blocks - 1).bit_length() - 3))
    return -(-blocks // quarter) * quarter


class Change(NamedTuple):
    """New arena, geometry and spec of a layer, applied by `QAttnLayer.take`.

    Attributes:
        arena, geometry: None if the layer has no tensors yet.
    """

    arena: torch.Tensor | None
    geometry: Geometry | None
    spec: LayerSpec


def selected(layer: HasRows, indices: Any) -> Any:
    """Return the change that keeps the rows selected by `indices`, in that order, for `take`; None before the first
    call.

    Args:
        indices: row numbers as a tensor, list or tuple, a bool mask, or a slice.

    Raises:
        QAttnError: a row that the layer does not have.
    """
    batch = layer.batch
    if batch is None:
        return None
    try:
        index = indices if isinstance(indices, slice) else torch.as_tensor(indices, device="cpu")
        rows = torch.arange(batch, device="cpu")[index].view(-1)
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise QAttnError(f"these are not rows of a cache with {batch}: {error}. Nothing was changed") from None
    return layer.with_rows(rows)


def repeated(layer: HasRows, repeats: int) -> Any:
    """Return the change that repeats each row `repeats` times in sequence, for `take`; None before the first call."""
    if layer.batch is None:
        return None
    return layer.with_rows(torch.arange(layer.batch, device="cpu").repeat_interleave(repeats))


def with_rows(layer: Packed, rows: torch.Tensor) -> Change:
    """Return the change to the rows `rows`, int64 `[B]`."""
    rows = rows.to(layer.device)

    def move(tensor: torch.Tensor, spec: TensorSpec, new: torch.Tensor) -> None:
        if spec.batch_dim is None:
            new.copy_(tensor)
        else:
            torch.index_select(tensor, spec.batch_dim, rows, out=new)

    return _changed(layer, replace(layer.geometry, batch=len(rows)), layer.spec, move)


def with_horizon(layer: Packed, tokens: int) -> Change | None:
    """Return the change to a ring that lets `crop` remove up to `tokens` tokens bit for bit; None
    if the ring suffices."""
    old = layer.spec
    if tokens <= old.window.horizon:
        return None
    spec = replace(old, window=replace(old.window, horizon=tokens))
    if not layer.is_initialized:
        return Change(None, None, spec)
    resized = resized_ring(layer.state, old, spec)
    return _changed(layer, layer.geometry, spec, lambda tensor, _, new: new.copy_(tensor), resized)


def with_blocks(layer: Packed, blocks: int) -> Change:
    """Return the change to a capacity of `blocks` blocks, at least those in use, with the same content."""
    return _changed(layer, replace(layer.geometry, blocks=blocks), layer.spec, copy_blocks)


def repacked(layer: Packed, spec: LayerSpec, blocks: int) -> Change:
    """Return the change to a capacity of `blocks` blocks, at least those in use, requantized to the fewer bits of
    `spec`."""
    if spec == layer.spec:
        return with_blocks(layer, blocks)
    layout = Layout(replace(layer.geometry, blocks=blocks), spec)
    arena = empty_arena(layout, layer.device)
    repack(layer.state, layer.spec, views(arena, layout), spec, layer_tensors(*layout))
    return Change(arena, layout.geometry, spec)


def _changed(
    layer: Packed,
    geometry: Geometry,
    spec: LayerSpec,
    move: Callable[[torch.Tensor, TensorSpec, torch.Tensor], Any],
    resized: State | None = None,
) -> Change:
    """Return a change with a new arena. `move` copies each state tensor, or its replacement from `resized`, to the
    arena."""
    layout = Layout(geometry, spec)
    arena = empty_arena(layout, layer.device)
    for name, new in views(arena, layout).items():
        if resized and name in resized:
            new.copy_(resized[name])
        else:
            move(layer.state[name], places(layout)[0][name][1], new)
    return Change(arena, geometry, spec)


def reorder(layer: Packed, rows: torch.Tensor, room: torch.Tensor) -> None:
    """Reorder rows in place: row i becomes the old row `rows[i]`. Addresses stay valid for compiled and captured steps.

    Args:
        rows: result of `rows_of`.
        room: uint8 work space of at least `room_to_reorder(layer)` bytes.
    """
    with layer.editing():
        if layer.spec.impl == "triton":
            assert layer.arena is not None
            reorder_arena(layer.arena, layer._layout, layer.blocks, rows)
        reorder_tensors(_one_by_one(layer), rows, room)


def room_to_reorder(layer: Packed) -> int:
    """Return the bytes of work space that `reorder` needs."""
    return largest_bytes(_one_by_one(layer))


def _one_by_one(layer: Packed) -> Tensors:
    """Return the tensors of a layer that no kernel reorders; their rows are moved one by one."""
    return (layer.outside_arena() if layer.spec.impl == "triton" else layer.state_tensors()).values()


def check_beams(layer: HasRows, beam_idx: torch.Tensor) -> None:
    """Check that `beam_idx`, int `[B]`, has one valid row for each row of the layer.

    Raises:
        QAttnError: wrong shape or an invalid row; nothing was changed.
    """
    batch = layer.batch
    # checking values on a GPU would wait for the device
    known = beam_idx.device.type != "cpu" or bool(((beam_idx >= 0) & (beam_idx < (batch or 0))).all())
    if batch is not None and (beam_idx.shape != (batch,) or not known):
        raise QAttnError(
            f"reorder_cache needs {batch} row numbers from 0 to {batch - 1}, one for each row of the cache, and got "
            f"{len(beam_idx)} numbers or numbers out of range. To keep some of the rows use batch_select_indices. "
            "Nothing was changed"
        )


def rows_of(layer: Packed, beam_idx: torch.Tensor) -> torch.Tensor:
    """Check `beam_idx` with `check_beams` and return it on the layer's device, for `reorder`.

    Raises:
        QAttnError: wrong shape or an invalid row; nothing was changed.
    """
    check_beams(layer, beam_idx)
    rows = beam_idx.to(layer.device)
    if layer.spec.impl == "triton":
        layer.state["length"].index_select(0, rows)  # on a GPU this raises for an invalid row
    return rows
