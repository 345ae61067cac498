"""The handle that a packed layer returns to the model in place of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from qattn_hf.errors import UnsupportedError


class Written(NamedTuple):
    """Result of a layer's write in one call, for the layers that share its keys and values (`kv_sharing.py`).

    Attributes:
        arena: uint8, the state with the call's tokens: the layer's arena or a copy.
        blocks: capacity of `arena` in blocks.
        past: an upper bound of the blocks that any row had closed before the call.
        before: uint8, the bytes at the start of `arena` that calls rewrite, as they were before the call.
        by_sdpa: True if PyTorch's SDPA attended to unquantized keys and values: an unpadded prompt of an empty cache.
    """

    arena: torch.Tensor
    blocks: int
    past: int
    before: torch.Tensor
    by_sdpa: bool = False


class Handle:
    """Placeholder for both the key and the value of one call, until the attention function writes them to the cache.

    The model may only pass it on to its attention. Any other use (arithmetic, slicing, reading a shape) raises
    `UnsupportedError`: a model that changed keys or values after the cache's update would get wrong results.

    Attributes:
        layer: the `QAttnLayer`.
        key, value: `[B, Hkv, T, D]`, the new tokens.
        cache: the `QAttnCache` of the layer; None if a layer is used alone.
        written: the `Written` of the call, if other layers read it; None before the write.
    """

    __slots__ = ("cache", "key", "layer", "taken", "value", "written")

    def __init__(self, layer: Any, key: torch.Tensor, value: torch.Tensor):
        self.layer, self.key, self.value = layer, key, value
        self.cache: Any = None
        self.taken = False
        self.written: Written | None = None

    def take(self, index: int | None) -> bool:
        """Return True if layer `index` only reads what an earlier layer wrote; the handle then belongs to that earlier
        layer.

        Raises:
            UnsupportedError: a layer that does not share keys and values reads them a second time.
        """
        if not self.taken or self.cache is None:
            self.taken = True
            return False
        layers = self.cache.layers
        reads = None if index is None else getattr(layers[index].spec, "reads", None)
        if self.written is None or reads is None or layers[reads] is not self.layer:
            _refuse("attention, a second time,")
        return True

    def to(self, *args: Any, **kwargs: Any) -> Handle:
        """Return the handle itself. Models that share keys between layers call this to move them to a device."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # the interpreter probes such names, for example in copy and inspect
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
