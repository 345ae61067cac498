"""Layers of a packed cache that are not packed: transformers' own cache layers, beside `QAttnLayer`s."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from qattn_hf.errors import UnsupportedError
from qattn_hf.layer.snapshot import Mark
from qattn_hf.model import _compat
from qattn_hf.model.layer_kinds import ModelLayerSpec

STATE = ("keys", "values", "conv_states", "recurrent_states")  # attributes with tensors, or dicts of tensors
# attributes beside them that say what the tensors hold; dicts by the number of a state
HOST = (
    "cumulative_length", "record_past", "is_conv_states_initialized", "is_recurrent_states_initialized",
    "has_previous_state", "conv_kernel_size",
)  # fmt: skip
Rows = dict[str, Any]


def state_tensors(layer: Any) -> dict[str, tuple[torch.Tensor, int | None]]:
    """Every tensor of a cache layer of transformers by name, with its batch dimension, 0."""
    found: dict[str, tuple[torch.Tensor, int | None]] = {}
    for name in STATE:
        held = vars(layer).get(name)  # packed attention beside a state has no tensors `keys` and `values`
        for part, tensor in held.items() if isinstance(held, dict) else ((None, held),):
            if tensor is not None and tensor.dim() > 1:  # empty keys have one dimension
                found[name if part is None else f"{name}.{part}"] = (tensor, 0)
    return found


def host_state(layer: Any) -> dict[str, Any]:
    """The attributes `HOST` of a cache layer of transformers, as JSON has them: dicts as lists."""
    held = {name: getattr(layer, name) for name in HOST if hasattr(layer, name)}
    return {name: [*value.values()] if isinstance(value, dict) else value for name, value in held.items()}


def restore(layer: Any, tensors: dict[str, torch.Tensor], host: dict[str, Any]) -> None:
    """Put the tensors of `state_tensors` and what `host_state` gave into an empty layer, on the tensors' device."""
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
    """All attributes of a cache layer as they are now, to be set again: what is written in place is copied, that is
    dicts and the states in them."""
    return {name: _copied(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}


def _copied(states: dict[Any, Any]) -> dict[Any, Any]:
    return {part: x.clone() if isinstance(x, torch.Tensor) else x for part, x in states.items()}


def rows_of(layer: Any, rows: torch.Tensor) -> Rows:
    """Attributes with the state of a cache layer of transformers, with these of its rows, int64 `[B]`."""

    def chosen(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or tensor.dim() < 2:
            return tensor
        return tensor.index_select(0, rows.to(tensor.device))

    held = {name: value for name, value in vars(layer).items() if name in STATE}
    return {
        name: {part: chosen(x) for part, x in value.items()} if isinstance(value, dict) else chosen(value)
        for name, value in held.items()
    }


class ModelLayer:
    """What `QAttnCache` asks of a layer that keeps a state of transformers' own; base of a class for each kind.

    The state is in model precision. Its tensors have the batch as their first dimension, and are replaced as tokens
    come, so that steps over them are not captured.

    Attributes:
        spec: kind and sizes of the layer.
        edits: how often the layer was written since it was empty.
        torn: whether an edit began that did not end and could not be taken back.
    """

    is_compileable = False
    spec: ModelLayerSpec
    edits = 0
    torn = False

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Write keys and values `[B, Hkv, T, D]`; returns those that the new tokens may attend to."""
        return self._written(super().update, *args, **kwargs)  # type: ignore[misc]

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        return self._written(super().update_conv_state, *args, **kwargs)  # type: ignore[misc]

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        return self._written(super().update_recurrent_state, *args, **kwargs)  # type: ignore[misc]

    def _written(self, write: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # a count that changes would compile every step anew
            self.edits += 1
        return write(*args, **kwargs)

    def state_tensors(self) -> dict[str, tuple[torch.Tensor, int | None]]:
        """Every tensor of the layer by name, with its batch dimension, 0."""
        return state_tensors(self)

    @property
    def batch(self) -> int | None:
        """Rows of the layer; None before its first call."""
        return next((tensor.shape[0] for tensor, _ in self.state_tensors().values()), None)

    def with_rows(self, rows: torch.Tensor) -> Rows:
        """Attributes of the layer with these of its rows, int64 `[B]`, for `take`."""
        return rows_of(self, rows)

    def take(self, rows: Rows | None) -> None:
        """Apply what `with_rows` made; None changes nothing. It cannot fail half way."""
        vars(self).update(rows or {})

    def reset(self) -> None:
        """Empty the layer."""
        self.__dict__ = vars(new_layer(self.spec))  # one assignment, which no interrupt divides

    def mark(self, bytes_too: bool) -> Mark:
        """The layer before an operation. `bytes_too` is for packed layers: states in dicts are copied in any case."""
        return Mark(attributes(self))

    def check_crop(self, count: int) -> None:
        """Check that the last `count` tokens can be removed, more than 0; `crop(-count)` does it.

        Raises:
            UnsupportedError: the state cannot be put back to where it was.
        """
        if not self._holds(count):
            raise UnsupportedError(
                f"cannot crop {count} columns: a layer that is the model's own has {self.spec}, and its state of that "
                "time is gone. Start from a fresh cache"
            )

    def _holds(self, count: int) -> bool:
        raise NotImplementedError

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -n tokens, which `check_crop` allowed; with 0, forget what was kept for a crop alone."""
        raise NotImplementedError


class SlidingLayer(ModelLayer, DynamicSlidingWindowLayer):
    """Keys and values of the last tokens, as many as the layer's window or chunk reaches back."""

    def _holds(self, count: int) -> bool:
        held = 0 if self.keys is None else self.keys.shape[-2]
        return held >= count + min(self.cumulative_length - count, self.sliding_window - 1)

    def crop(self, tokens_to_remove: int) -> None:
        if self.is_initialized and (tokens_to_remove or self.record_past):
            DynamicSlidingWindowLayer.crop(self, tokens_to_remove)


class StateLayer(ModelLayer, LinearAttentionLayer):
    """Convolution and recurrent states of linear attention, an SSM or a convolution."""

    def _holds(self, count: int) -> bool:
        return self.is_croppable and all(
            held.shape[-1] >= count + self.conv_kernel_size[i] for i, held in self.conv_states.items()
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
    """An empty layer of this kind."""
    make: Any = CLASSES[spec.kind]
    layer: ModelLayer = make(sliding_window=spec.window, number_of_states=spec.states)
    layer.spec = spec
    return layer
