"""Find the device on which a model computes. Between two calls the weights may be on another device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._guards import detect_fake_mode
from transformers import PreTrainedModel


def modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield every module once, in the order of `model.modules()`. Building no names makes it several times faster."""
    stack: list[torch.nn.Module | None] = [model]
    visited = set()
    while stack:
        module = stack.pop()
        if module is not None and module not in visited:
            visited.add(module)
            stack.extend(reversed(vars(module)["_modules"].values()))
            yield module


def device_of(model: PreTrainedModel) -> torch.device:
    """Return the device on which a model computes. Weights that accelerate offloads are moved there for each call."""
    own = model.device
    if own.type not in ("meta", "cpu"):  # weights on a GPU compute there
        return own
    for module in modules(model):
        hook = vars(module).get("_hf_hook")
        for part in getattr(hook, "hooks", [hook]):  # accelerate has single hooks and sequences of hooks
            device = getattr(part, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return own


def compiling() -> bool:
    """Return whether `torch.compile` or `torch.export` traces the code that calls this.

    `torch.compiler.is_compiling` is also true in all other threads of the process while one of them compiles.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_compiling() and detect_fake_mode() is not None  # modes are of one thread


def capturing() -> bool:
    """Return whether a CUDA graph is being captured. Kernels launched now are recorded and do not run."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def only_moves(module: torch.nn.Module) -> bool:
    """Return whether a module's instance attribute `forward` only moves tensors, then calls the forward of its class.

    This is true for accelerate, when weights are dispatched, and for compressed-tensors after it has unpacked codes.
    """
    own = vars(module)
    return "_hf_hook" in own or own.get("_original_forward_func") is type(module).forward
