"""The device on which a model computes, which need not be where its weights are between two calls."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel


def modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Every module once, in the order of `model.modules()`, which takes several times as long: it builds names too."""
    stack: list[torch.nn.Module | None] = [model]
    visited = set()
    while stack:
        module = stack.pop()
        if module is not None and module not in visited:
            visited.add(module)
            stack.extend(reversed(vars(module)["_modules"].values()))
            yield module


def device_of(model: PreTrainedModel) -> torch.device:
    """Device on which a model computes; weights that accelerate offloads are moved there for each call."""
    own = model.device
    if own.type not in ("meta", "cpu"):  # weights on a GPU compute there
        return own
    for module in modules(model):
        hook = vars(module).get("_hf_hook")
        for part in getattr(hook, "hooks", [hook]):  # accelerate has single hooks and sequences of them
            device = getattr(part, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return own


def capturing() -> bool:
    """Whether a CUDA graph is being captured: kernels that are launched now are recorded and do not run."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def only_moves(module: torch.nn.Module) -> bool:
    """Whether the `forward` that a module has on its instance only moves tensors, then calls its class's.

    So do accelerate's, where weights are dispatched, and compressed-tensors', once it has unpacked codes.
    """
    own = vars(module)
    return "_hf_hook" in own or own.get("_original_forward_func") is type(module).forward
