"""Changes that replace tensors of a layer: other rows, a larger ring, more blocks.

A change is computed whole (`Change`) before it is applied (`QAttnLayer.take`), which cannot fail. A cache computes the
changes of all its layers first: where memory runs out or an argument is wrong, every layer is as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from qattn_hf.errors import QAttnError
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import layer_tensors
from qattn_kernels.layout import Geometry, State
from qattn_kernels.ops.crop.ring import resized_ring

if TYPE_CHECKING:
    from qattn_hf.layer import QAttnLayer


class Change(NamedTuple):
    """New tensors, geometry and spec of a layer, to be applied by `QAttnLayer.take`.

    Attributes:
        state: those tensors of the state that are replaced, by name.
        geometry: None where the layer has no tensors yet.
    """

    state: State
    geometry: Geometry | None
    spec: LayerSpec


def selected(layer: QAttnLayer, indices: Any) -> Change | None:
    """The layer with only the rows that `indices` selects, in that order; None before its first call.

    Args:
        indices: row numbers as a tensor, list or tuple, a bool mask, or a slice.

    Raises:
        QAttnError: a row that the layer does not have.
    """
    if not layer.is_initialized:
        return None
    batch = layer.geometry.batch
    try:
        index = indices if isinstance(indices, slice) else torch.as_tensor(indices).cpu()
        rows = torch.arange(batch)[index].view(-1).to(layer.device)
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise QAttnError(f"these are no rows of a cache that has {batch}: {error}. Nothing was changed") from None
    return _with_rows(layer, len(rows), lambda tensor, dim: tensor.index_select(dim, rows))


def repeated(layer: QAttnLayer, repeats: int) -> Change | None:
    """The layer with each row repeated `repeats` times in sequence; None before its first call."""
    if not layer.is_initialized:
        return None
    batch = layer.geometry.batch * repeats
    return _with_rows(layer, batch, lambda tensor, dim: tensor.repeat_interleave(repeats, dim))


def _with_rows(layer: QAttnLayer, batch: int, move: Callable[[torch.Tensor, int], torch.Tensor]) -> Change:
    tensors = layer.state_tensors().items()
    with torch.inference_mode(False):  # else what began under inference_mode could not be written outside it
        state = {name: move(tensor, dim).clone() for name, (tensor, dim) in tensors if dim is not None}
    return Change(state, replace(layer.geometry, batch=batch), layer.spec)


def with_horizon(layer: QAttnLayer, tokens: int) -> Change | None:
    """The layer with a ring from which `crop` removes up to `tokens` tokens bit for bit; None if it has such a ring."""
    old = layer.spec
    if tokens <= old.window.horizon:
        return None
    spec = replace(old, window=replace(old.window, horizon=tokens))
    if not layer.is_initialized:
        return Change({}, None, spec)
    with torch.inference_mode(False):
        return Change(resized_ring(layer.state, old, spec), layer.geometry, spec)


def with_blocks(layer: QAttnLayer, blocks: int) -> Change:
    """The layer with capacity for `blocks` blocks, more than before, and the same content."""
    geometry, state = replace(layer.geometry, blocks=blocks), {}
    with torch.inference_mode(False):
        for name, spec in layer_tensors(geometry, layer.spec).items():
            if spec.block_dim is not None:
                state[name] = spec.empty_state(layer.device)
                state[name].narrow(spec.block_dim, 0, layer.blocks).copy_(layer.state[name])
    return Change(state, geometry, layer.spec)


def reorder(layer: QAttnLayer, beam_idx: torch.Tensor, room: torch.Tensor | None = None) -> None:
    """Reorder rows in place: row i becomes the old row `beam_idx[i]`. Addresses stay, for compiled and captured steps.

    Args:
        beam_idx: int `[B]`.
        room: uint8 of at least `largest_bytes(layer)` to work in, so that memory cannot run out half way.

    Raises:
        QAttnError: not one valid row for each row of the layer; nothing was changed.
    """
    if not layer.is_initialized:
        return
    rows, batch = beam_idx.to(layer.device), layer.geometry.batch
    known = rows.device.type != "cpu" or bool(((rows >= 0) & (rows < batch)).all())  # a GPU would have to be waited for
    if rows.shape != (batch,) or not known:
        raise QAttnError(
            f"reorder_cache takes the number of one of {batch} rows for each row of the cache, not {len(rows)} "
            "numbers or others; batch_select_indices keeps some of the rows. Nothing was changed"
        )
    room = torch.empty(largest_bytes(layer), dtype=torch.uint8, device=layer.device) if room is None else room
    with layer.editing():
        for tensor, dim in layer.state_tensors().values():
            if dim is not None and tensor.numel():
                moved = room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                tensor.copy_(torch.index_select(tensor, dim, rows, out=moved))


def largest_bytes(layer: QAttnLayer) -> int:
    """Bytes of a layer's largest tensor; 0 before its first call."""
    return max((tensor.nbytes for tensor, _ in layer.state_tensors().values()), default=0)
