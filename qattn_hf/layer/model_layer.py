"""Unpacked layers of a packed cache: Transformers' cache layers, used together with `QAttnLayer`s."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from qattn_hf.errors import UnsupportedError
from qattn_hf.layer.snapshot import Mark
from qattn_hf.model import _compat
from qattn_hf.model.device import compiling
from qattn_hf.model.layer_kinds import ModelLayerSpec

STATE = ("keys", "values", "conv_states", "recurrent_states")  # attributes with tensors, or dicts of tensors
# other attributes, which describe the tensors; dicts are keyed by the number of a state
HOST = (
    "cumulative_length", "record_past", "is_conv_states_initialized", "is_recurrent_states_initialized",
    "has_previous_state", "conv_kernel_size",
)  # fmt: skip
Rows = dict[str, Any]


def state_tensors(layer: Any) -> dict[str, tuple[torch.Tensor, int | None]]:
    """Return every tensor of a Transformers cache layer by name, with its batch dimension, 0."""
    found: dict[str, tuple[torch.Tensor, int | None]] = {}
    for name in STATE:
        value = vars(layer).get(name)  # a hybrid layer has no tensors `keys` and `values`
        for part, tensor in value.items() if isinstance(value, dict) else ((None, value),):
            if tensor is not None and tensor.dim() > 1:  # empty keys have one dimension
                found[name if part is None else f"{name}.{part}"] = (tensor, 0)
    return found


def host_state(layer: Any) -> dict[str, Any]:
    """Return the attributes `HOST` of a Transformers cache layer as JSON values: dicts become lists."""
    values = {name: getattr(layer, name) for name in HOST if hasattr(layer, name)}
    return {name: [*value.values()] if isinstance(value, dict) else value for name, value in values.items()}


def restore(layer: Any, tensors: dict[str, torch.Tensor], host: dict[str, Any]) -> None:
    """Restore the results of `state_tensors` and `host_state` into an empty layer, on the tensors' device."""
    if "keys" in tensors:
        layer.lazy_initialization(tensors["keys"], tensors["values"])
    for name, tensor in tensors.items():
        name, _, part = name.partition(".")
        if part:
            getattr(layer, name)[int(part)] = tensor
        else:
            setattr(layer, name, tensor)
        layer.dtype, layer.device = tensor.dtype, tensor.device
    for name, value in host.items():
        setattr(layer, name, dict(enumerate(value)) if isinstance(value, list) else value)


def attributes(layer: Any) -> dict[str, Any]:
    """Return all attributes of a cache layer, to be restored later. Dicts, and states in dicts, are copied: calls write
    them in place."""
    return {name: _copied(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}


def _copied(states: dict[Any, Any]) -> dict[Any, Any]:
    return {part: x.clone() if isinstance(x, torch.Tensor) else x for part, x in states.items()}


def rows_of(layer: Any, rows: torch.Tensor) -> Rows:
    """Return the state attributes of a Transformers cache layer with the rows `rows`, int64 `[B]`."""

    def chosen(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or tensor.dim() < 2:
            return tensor
        return tensor.index_select(0, rows.to(tensor.device))

    states = {name: value for name, value in vars(layer).items() if name in STATE}
    return {
        name: {part: chosen(x) for part, x in value.items()} if isinstance(value, dict) else chosen(value)
        for name, value in states.items()
    }


class ModelLayer:
    """Base of unpacked layers: what `QAttnCache` needs from a layer that keeps a state of Transformers.

    The state has the model's dtype. The batch is the first dimension of its tensors. New tokens replace the tensors, so
    steps over these layers are not captured.

    Attributes:
        spec: kind and sizes of the layer.
        edits: number of writes since the layer was empty.
        torn: True if an edit was interrupted and could not be undone.
    """

    is_compileable = False
    spec: ModelLayerSpec
    edits = 0
    torn = False

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Write keys and values `[B, Hkv, T, D]`. Returns those that the new tokens may attend to."""
        return self._written(super().update, *args, **kwargs)  # type: ignore[misc]

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        return self._written(super().update_conv_state, *args, **kwargs)  # type: ignore[misc]

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        return self._written(super().update_recurrent_state, *args, **kwargs)  # type: ignore[misc]

    def _written(self, write: Any, *args: Any, **kwargs: Any) -> Any:
        if not compiling():  # a changing count would recompile every step
            self.edits += 1
        return write(*args, **kwargs)

    def state_tensors(self) -> dict[str, tuple[torch.Tensor, int | None]]:
        """Return every tensor of the layer by name, with its batch dimension, 0."""
        return state_tensors(self)

    @property
    def batch(self) -> int | None:
        """Rows of the layer; None before its first call."""
        return next((tensor.shape[0] for tensor, _ in self.state_tensors().values()), None)

    def with_rows(self, rows: torch.Tensor) -> Rows:
        """Return the layer's attributes with the rows `rows`, int64 `[B]`, for `take`."""
        return rows_of(self, rows)

    def take(self, rows: Rows | None) -> None:
        """Apply a result of `with_rows`; None changes nothing. It applies completely or not at all."""
        vars(self).update(rows or {})

    def reset(self) -> None:
        """Empty the layer."""
        self.__dict__ = vars(new_layer(self.spec))  # one assignment, so an interrupt cannot split it

    def mark(self, bytes_too: bool) -> Mark:
        """Return the layer's state before an operation. `bytes_too` matters only to packed layers: calls replace these
        tensors, and states in dicts are always copied."""
        return Mark(attributes(self))

    def before_call(self, tokens: int) -> Mark:
        """Return the layer's state before a call of `tokens` tokens per row."""
        return self.mark(bytes_too=False)

    def check_crop(self, count: int) -> None:
        """Check that `crop(-count)` can remove the last `count` tokens; `count` is above 0.

        Raises:
            UnsupportedError: the earlier state cannot be restored.
        """
        if not self._holds(count):
            raise UnsupportedError(
                f"cannot crop {count} columns: an unpacked layer has {self.spec}, and its earlier state is gone. Start "
                "from a fresh cache"
            )

    def _holds(self, count: int) -> bool:
        raise NotImplementedError

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last n tokens for -n, after `check_crop`. 0 only drops what was kept for a crop."""
        raise NotImplementedError


class SlidingLayer(ModelLayer, DynamicSlidingWindowLayer):
    """Keys and values of the last tokens, up to the size of the layer's window or chunk."""

    def _holds(self, count: int) -> bool:
        tokens = 0 if self.keys is None else self.keys.shape[-2]
        return tokens >= count + min(self.cumulative_length - count, self.sliding_window - 1)

    def crop(self, tokens_to_remove: int) -> None:
        if self.is_initialized and (tokens_to_remove or self.record_past):
            DynamicSlidingWindowLayer.crop(self, tokens_to_remove)


class StateLayer(ModelLayer, LinearAttentionLayer):
    """Convolution and recurrent states of linear attention, an SSM or a convolution."""

    def _holds(self, count: int) -> bool:
        return self.is_croppable and all(
            state.shape[-1] >= count + self.conv_kernel_size[i] for i, state in self.conv_states.items()
        )

    def crop(self, tokens_to_remove: int) -> None:
        if self.record_past and self.is_croppable:
            LinearAttentionLayer.crop(self, tokens_to_remove)


class EmptyLayer(ModelLayer, _compat.NoStateLayer):
    """A layer without keys and states: it has no attention, or reads keys and values of an earlier layer."""

    is_croppable = is_compileable = True

    def _holds(self, count: int) -> bool:
        return True

    def crop(self, tokens_to_remove: int) -> None:
        pass


CLASSES: dict[str, type[ModelLayer]] = {
    "sliding_attention": SlidingLayer,
    "chunked_attention": SlidingLayer,
    "linear_attention": StateLayer,
    "conv": StateLayer,
    "dummy": EmptyLayer,
}


def new_layer(spec: ModelLayerSpec) -> ModelLayer:
    """Return an empty layer of this kind."""
    make: Any = CLASSES[spec.kind]
    layer: ModelLayer = make(sliding_window=spec.window, number_of_states=spec.states)
    layer.spec = spec
    return layer
