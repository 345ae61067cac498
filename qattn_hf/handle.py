"""The handle that a packed layer returns to the model in place of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from qattn_hf.errors import UnsupportedError


class Handle:
    """Stands for the key AND the value of one call, until the attention function writes them to the cache.

    The model may only pass it on to its attention. Any other use (arithmetic, slicing, reading a shape) raises
    `UnsupportedError`: a model that changes keys or values behind its cache would otherwise be silently wrong.

    Attributes:
        layer: the `QAttnLayer`. key, value: `[B, Hkv, T, D]`, the new tokens.
        cache: the `QAttnCache` of the layer; None where a layer is used alone.
    """

    __slots__ = ("cache", "key", "layer", "taken", "value")

    def __init__(self, layer: Any, key: torch.Tensor, value: torch.Tensor):
        self.layer, self.key, self.value = layer, key, value
        self.cache: Any = None
        self.taken = False

    def take(self, index: int | None) -> Handle:
        """The handle from which layer `index` attends: this one at first, then one of the layer's own.

        A model may share keys and values between layers. Their first reader writes them; each other one packs them once
        more, in a layer of its own.

        Raises:
            UnsupportedError: a layer reads the keys and values of one call twice.
        """
        if not self.taken or self.cache is None:
            self.taken = True
            return self
        layer = None if index is None else self.cache.layers[index]
        if layer is None or layer is self.layer or type(layer) is not type(self.layer):
            _refuse("attention, a second time,")
        again: Handle = layer.update(self.key, self.value)[0]
        return again

    def to(self, *args: Any, **kwargs: Any) -> Handle:
        """Return the handle itself: models that share keys between layers call this to move them to a device."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # probes of the interpreter, as of copy and inspect
            raise AttributeError(name)
        _refuse(name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _refuse(getattr(func, "__name__", str(func)))


def _refuse(what: str) -> NoReturn:
    raise UnsupportedError(
        f"this model uses `{what}` on keys or values between its cache and its attention, which a packed cache cannot "
        "serve: unpatch(model) and use a stock cache. A QAttnCache needs a model prepared by qattn_hf.patch"
    )


def _refusing(name: str) -> Callable[..., NoReturn]:
    def method(self: Handle, *args: Any) -> NoReturn:
        _refuse(name)

    return method


for _name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "matmul",
    "rmatmul",
    "neg",
    "getitem",
    "len",
    "iter",
):
    setattr(Handle, f"__{_name}__", _refusing(f"__{_name}__"))
