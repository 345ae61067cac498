"""Choose the heads that get 2 bits: TurboAttention, section 3.2."""

from __future__ import annotations

from functools import cache

import torch


def head_priority(x1: torch.Tensor, scale: torch.Tensor, keep: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the fp64 priority `[B, H]` of each head in one block `X1` `[B, H, block, D]`. The lowest get 2 bits.

    Args:
        x1: INT8 `[B, H, block, D]`.
        scale: `[B, H]`, or per token `[B, H, block]`.
        keep: bool `[B, H, block]`, tokens that count.
        kind: `priority` (section 3.2) multiplies the head's gap by the deviation of its channels' gaps. `min_max` and
            `variation` are these two factors. `entropy` uses a 256-bin histogram, `random` a fixed shuffle.
    """
    if kind == "random":
        return _shuffle(x1.shape[1], x1.device).expand(x1.shape[0], -1)
    values = x1.float() * scale.view(*x1.shape[:2], -1, 1)  # fp32, because a kernel cannot hold a block in fp64
    low = torch.where(keep[..., None], values, torch.inf).amin(-2).double()
    high = torch.where(keep[..., None], values, -torch.inf).amax(-2).double()
    gap = (high - low).nan_to_num(0.0, 0.0, 0.0)  # a block without finite tokens has gap 0
    if kind == "entropy":
        return _entropy(values.double(), keep, low.amin(-1), high.amax(-1))
    head_gap, deviation = (high.amax(-1) - low.amin(-1)).nan_to_num(0.0, 0.0, 0.0), gap.std(-1)
    return {"priority": head_gap * deviation, "min_max": head_gap, "variation": deviation}[kind]


@cache
def _shuffle(heads: int, device: torch.device) -> torch.Tensor:
    """Return a fixed shuffle, fp64 `[heads]`, copied to a GPU once: a CUDA graph cannot record the copy."""
    order = torch.randperm(heads, generator=torch.Generator().manual_seed(0), device="cpu")
    return order.to(device, torch.float64)


def _entropy(values: torch.Tensor, keep: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    width = torch.where(high > low, high - low, 1.0)[..., None, None]
    bins = ((values - low[..., None, None]) / width * 256).clamp(0, 255).nan_to_num(0.0).long()
    weight = keep[..., None].expand_as(values).double()
    counts = torch.zeros(*values.shape[:2], 256, dtype=torch.float64, device=values.device)
    counts.scatter_add_(2, bins.flatten(2), weight.flatten(2))
    share = counts / counts.sum(-1, keepdim=True).clamp(min=1)
    return torch.special.entr(share).sum(-1)
