"""Changes that replace tensors of a layer: other rows, a larger ring, more blocks, fewer bits.

A change is computed whole (`Change`) before it is applied (`QAttnLayer.take`), which cannot fail. A cache computes the
changes of all its layers first: where memory runs out or an argument is wrong, every layer is as it was.
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
    """Capacity, in blocks, of a growing layer that must hold `blocks`: rounded up to a quarter of a power of two.

    So a cache that grows token by token is copied seldom.
    """
    quarter = max(1, 1 << max(0, (blocks - 1).bit_length() - 3))
    return -(-blocks // quarter) * quarter


class Change(NamedTuple):
    """A new arena, geometry and spec of a layer, to be applied by `QAttnLayer.take`.

    Attributes:
        arena, geometry: None where the layer has no tensors yet.
    """

    arena: torch.Tensor | None
    geometry: Geometry | None
    spec: LayerSpec


def selected(layer: HasRows, indices: Any) -> Any:
    """The layer with only the rows that `indices` selects, in that order, for its `take`; None before its first call.

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
        raise QAttnError(f"these are no rows of a cache that has {batch}: {error}. Nothing was changed") from None
    return layer.with_rows(rows)


def repeated(layer: HasRows, repeats: int) -> Any:
    """The layer with each row repeated `repeats` times in sequence, for its `take`; None before its first call."""
    if layer.batch is None:
        return None
    return layer.with_rows(torch.arange(layer.batch, device="cpu").repeat_interleave(repeats))


def with_rows(layer: Packed, rows: torch.Tensor) -> Change:
    """The layer with these of its rows, int64 `[B]`."""
    rows = rows.to(layer.device)

    def move(tensor: torch.Tensor, spec: TensorSpec, new: torch.Tensor) -> None:
        if spec.batch_dim is None:
            new.copy_(tensor)
        else:
            torch.index_select(tensor, spec.batch_dim, rows, out=new)

    return _changed(layer, replace(layer.geometry, batch=len(rows)), layer.spec, move)


def with_horizon(layer: Packed, tokens: int) -> Change | None:
    """The layer with a ring from which `crop` removes up to `tokens` tokens bit for bit; None if it has such a ring."""
    old = layer.spec
    if tokens <= old.window.horizon:
        return None
    spec = replace(old, window=replace(old.window, horizon=tokens))
    if not layer.is_initialized:
        return Change(None, None, spec)
    resized = resized_ring(layer.state, old, spec)
    return _changed(layer, layer.geometry, spec, lambda tensor, _, new: new.copy_(tensor), resized)


def with_blocks(layer: Packed, blocks: int) -> Change:
    """The layer with capacity for `blocks` blocks, as many as it uses or more, and the same content."""
    return _changed(layer, replace(layer.geometry, blocks=blocks), layer.spec, copy_blocks)


def repacked(layer: Packed, spec: LayerSpec, blocks: int) -> Change:
    """The layer with capacity for `blocks` blocks, as many as it uses or more, in the fewer bits of `spec`."""
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
    """The layer in a new arena, to which `move` takes each state tensor, or what `resized` has in its place."""
    layout = Layout(geometry, spec)
    arena = empty_arena(layout, layer.device)
    for name, new in views(arena, layout).items():
        if resized and name in resized:
            new.copy_(resized[name])
        else:
            move(layer.state[name], places(layout)[0][name][1], new)
    return Change(arena, geometry, spec)


def reorder(layer: Packed, rows: torch.Tensor, room: torch.Tensor) -> None:
    """Reorder rows in place: row i becomes the old row `rows[i]`. Addresses stay, for compiled and captured steps.

    Args:
        rows: from `rows_of`. room: uint8 of at least `room_to_reorder(layer)` to work in.
    """
    with layer.editing():
        if layer.spec.impl == "triton":
            assert layer.arena is not None
            reorder_arena(layer.arena, layer._layout, layer.blocks, rows)
        reorder_tensors(_one_by_one(layer), rows, room)


def room_to_reorder(layer: Packed) -> int:
    """Bytes that `reorder` needs beside a layer."""
    return largest_bytes(_one_by_one(layer))


def _one_by_one(layer: Packed) -> Tensors:
    """The tensors of a layer whose rows move one by one: those that no kernel moves."""
    return (layer.beside() if layer.spec.impl == "triton" else layer.state_tensors()).values()


def check_beams(layer: HasRows, beam_idx: torch.Tensor) -> None:
    """Check that `beam_idx`, int `[B]`, has one valid row for each row of the layer.

    Raises:
        QAttnError: it has not; nothing was changed.
    """
    batch = layer.batch
    # a GPU would have to be waited for
    known = beam_idx.device.type != "cpu" or bool(((beam_idx >= 0) & (beam_idx < (batch or 0))).all())
    if batch is not None and (beam_idx.shape != (batch,) or not known):
        raise QAttnError(
            f"reorder_cache takes the number of one of {batch} rows for each row of the cache, not {len(beam_idx)} "
            "numbers or others; batch_select_indices keeps some of the rows. Nothing was changed"
        )


def rows_of(layer: Packed, beam_idx: torch.Tensor) -> torch.Tensor:
    """`beam_idx` on the layer's device, after `check_beams`, for `reorder`.

    Raises:
        QAttnError: not one valid row for each row of the layer; nothing was changed.
    """
    check_beams(layer, beam_idx)
    rows = beam_idx.to(layer.device)
    if layer.spec.impl == "triton":
        layer.state["length"].index_select(0, rows)  # on a GPU this refuses a number that no row has
    return rows
