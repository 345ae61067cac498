"""Packed attention has no gradient: a backward pass raises an error, in compiled steps too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qattn_hf.errors import UnsupportedError


@torch.library.custom_op("qattn::refuse_gradient", mutates_args=())
def refuse_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Raise `UnsupportedError`. This is an operator, because a compiler would run plain Python of a backward pass while
    tracing."""
    raise UnsupportedError(
        "packed attention has no gradient: call model.train() or pass use_cache=False to record gradients, and call a "
        "patched model under torch.no_grad() otherwise"
    )


@refuse_gradient.register_fake
def _(gradient: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient)


class _NoGradient(torch.autograd.Function):
    """Return `out` unchanged, with a dependency on `source` (any shape), so that a backward pass reaches
    `refuse_gradient`."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        ctx.shape = source.shape
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, refuse_gradient(gradient).new_zeros(ctx.shape)


def without_gradient(attend: Callable[[], torch.Tensor], *sources: torch.Tensor) -> torch.Tensor:
    """Return `attend()`; a backward pass through the result raises `UnsupportedError`.

    Args:
        attend: computes attention.
        sources: its inputs; any of them may require a gradient.
    """
    if not torch.is_grad_enabled():
        return attend()
    with torch.no_grad():
        out = attend()
    source = next((x for x in sources if x.requires_grad), None)
    return out if source is None else _NoGradient.apply(out, source)
