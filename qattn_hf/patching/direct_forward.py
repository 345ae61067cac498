"""Run the hooks of a patched model when its `forward` is called directly, as sentence-transformers does."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf.cache.cache import QAttnCache
from qattn_hf.generate.continuous.cache import PagedCache
from qattn_hf.model._compat import CACHE
from qattn_hf.model.bound_method import BoundMethod
from qattn_hf.model.device import compiling
from qattn_hf.patching.training import select_attention, why_unpacked


class Forward(BoundMethod):
    """Override of `forward`, with the signature of the class's `forward`."""

    def __init__(self, model: Any):
        super().__init__(forward, model)
        self.__signature__ = inspect.signature(type(model).forward.__get__(model))

    @property
    def __code__(self) -> Any:
        """Code of the class's `forward`. `torch.export` reads it before its first call."""
        model: Any = self._model()
        return type(model).forward.__code__

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        model = self._model()
        return Forward(memo.get(id(model), model))

    def __reduce__(self) -> Any:
        return Forward, (self._model(),)


def forward(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Run the class's `forward` inside a call whose hooks have run, or in a call that trains, which needs no hooks.

    Otherwise start a call, which runs the hooks."""
    if compiling() or not hasattr(model, "_qattn") or _inside_call(kwargs):
        return type(model).forward(model, *args, **kwargs)
    if (unpacked := why_unpacked(model, kwargs)) is not None:
        select_attention(model, unpacked)
        return type(model).forward(model, *args, **kwargs)
    return model(*args, **kwargs)


def _inside_call(kwargs: dict[str, Any]) -> bool:
    """Return whether a call's hooks have seen these arguments. The hooks begin the call of a packed cache."""
    cache = kwargs.get(CACHE)
    return isinstance(kwargs.get("cache"), PagedCache) or (isinstance(cache, QAttnCache) and cache.calling)


def install(module: torch.nn.Module) -> None:
    """Install the override on a module, unless another library has one there, as accelerate for offloaded weights."""
    if "forward" not in module.__dict__:
        module.forward = Forward(module)


def uninstall(module: torch.nn.Module) -> None:
    """Remove the override. If accelerate has wrapped it, it stays and acts like the class's `forward`."""
    if isinstance(module.__dict__.get("forward"), Forward):
        del module.forward
