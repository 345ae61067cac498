"""Changes that give tensors of a layer another place: other rows, another ring, more blocks.

Each is made whole before anything changes (`Change`), then taken (`QAttnLayer.take`), which cannot fail. So a cache
makes the changes of all its layers first: where memory runs out, or an argument is wrong, every layer is as it was.
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
    """What a layer becomes: those tensors of its state that are new, its geometry (None: it has no tensors yet), and
    its spec."""

    state: State
    geometry: Geometry | None
    spec: LayerSpec


def selected(layer: QAttnLayer, indices: Any) -> Change | None:
    """The rows that `indices` names, in that order: a tensor of numbers, a mask, a list, a tuple or a slice.

    Raises:
        QAttnError: if it names rows that the layer does not have.
    """
    if not layer.is_initialized:
        return None
    batch = layer.geometry.batch
    try:
        asked = indices if isinstance(indices, slice) else torch.as_tensor(indices).cpu()
        rows = torch.arange(batch)[asked].view(-1).to(layer.device)
    except (IndexError, TypeError, ValueError, RuntimeError) as error:
        raise QAttnError(f"these are no rows of a cache that has {batch}: {error}. Nothing was changed") from None
    return _with_rows(layer, len(rows), lambda tensor, dim: tensor.index_select(dim, rows))


def repeated(layer: QAttnLayer, repeats: int) -> Change | None:
    """Each row `repeats` times, one after another."""
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
    """A ring from which `crop` takes back `tokens` tokens bit for bit, if the layer has a shorter one."""
    old = layer.spec
    if tokens <= old.window.horizon:
        return None
    spec = replace(old, window=replace(old.window, horizon=tokens))
    if not layer.is_initialized:
        return Change({}, None, spec)
    with torch.inference_mode(False):
        return Change(resized_ring(layer.state, old, spec), layer.geometry, spec)


def with_blocks(layer: QAttnLayer, blocks: int) -> Change:
    """Arenas of `blocks` blocks, more than before, with the old content."""
    geometry, state = replace(layer.geometry, blocks=blocks), {}
    with torch.inference_mode(False):
        for name, spec in layer_tensors(geometry, layer.spec).items():
            if spec.block_dim is not None:
                state[name] = spec.empty_state(layer.device)
                state[name].narrow(spec.block_dim, 0, layer.blocks).copy_(layer.state[name])
    return Change(state, geometry, layer.spec)


def reorder(layer: QAttnLayer, beam_idx: torch.Tensor, room: torch.Tensor | None = None) -> None:
    """Row i becomes the old row `beam_idx[i]`, in place, since compiled and captured steps know the addresses.

    Args:
        beam_idx: int `[B]`.
        room: uint8 of at least `largest_bytes(layer)` to work in, so that memory cannot run out half way.

    Raises:
        QAttnError: if that is not one row for each; nothing was changed.
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
    """Size of a layer's largest tensor."""
    return max((tensor.nbytes for tensor, _ in layer.state_tensors().values()), default=0)
