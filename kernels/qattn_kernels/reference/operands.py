"""Operands of a prefill, quantized for one call where a cache has no codes for them: SageAttention2 over any cache.

Keys less their mean in INT8 or INT4, with a scale a group of tokens (sections 3.2 and 3.3); values in FP8 with a scale
a channel (section 3.5). Plain PyTorch, the specification; `papers/sage_attention.py` is the whole algorithm.
"""

from __future__ import annotations

import torch

from qattn_kernels.formats import Operand
from qattn_kernels.formats.granularity import shared_maximum
from qattn_kernels.layer.spec import Compute, LayerSpec
from qattn_kernels.reference.tiles import FOREVER, Tiles

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def fp8_values(compute: Compute) -> bool:
    """Whether a prefill with this `Compute` multiplies weights and values in FP8."""
    return compute.prefill == "int8" and compute.pv in FP8


def rounded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """fp32 `x`, none beyond the largest number of the FP8 format `kind` (`e4m3`, `e5m2`), rounded to that format."""
    return x.to(FP8[kind]).float()


def operands(tiles: Tiles, spec: LayerSpec) -> Tiles:
    """`tiles` of all that a call sees, with codes where `spec.compute` multiplies codes and the formats have none.

    Smoothed keys keep their mean as `k.mean`, and as `k_exact` what is left of them before it is quantized.
    """
    compute = spec.compute
    if compute.prefill != "int8":
        return tiles
    visible = (tiles.keep & (tiles.since < FOREVER))[..., None]
    if not spec.k.integer:
        exact = tiles.k.dequantize()
        mean = masked_mean(exact, visible) if compute.smooth_k else torch.zeros_like(exact[:, :, :1, :1])
        centered = torch.where(visible, exact - mean, 0.0)
        coded = quantize_keys(centered, compute)
        k_mean = mean.expand(-1, -1, exact.shape[2], -1, -1) if compute.smooth_k else None
        tiles = tiles._replace(k=coded._replace(mean=k_mean), k_exact=centered)
    if fp8_values(compute):
        tiles = tiles._replace(v=channel_values(tiles.v.dequantize(), visible, compute))
    return tiles


def masked_mean(x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Mean `[B, H, 1, 1, D]` of the tokens `[B, H, n, block, D]` that are `visible`.

    Summed in fp64: rounded from there a mean does not depend on the order of its sum, so that a padded row has the
    codes of the row alone.
    """
    count = visible.sum((2, 3), keepdim=True).clamp(min=1)
    return (torch.where(visible, x, 0.0).double().sum((2, 3), keepdim=True) / count).float()


def quantize_keys(x: torch.Tensor, compute: Compute) -> Operand:
    """Symmetric INT8 codes up to `compute.qk_levels` of keys `[B, H, n, block, D]`, with a scale a group of tokens as
    `compute.k_scale` says."""
    top = x.abs().amax(-1)
    if compute.k_scale == "tensor":
        top = top.amax((-1, -2), keepdim=True).expand(top.shape)
    else:
        top = shared_maximum(top, compute.k_scale)
    scale = top / torch.full_like(top, compute.qk_levels)
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
    codes = torch.round(x / torch.where(scale == 0, 1.0, scale)[..., None])
    return Operand(codes.clamp(-compute.qk_levels, compute.qk_levels).to(torch.int8), scale)


def channel_values(x: torch.Tensor, visible: torch.Tensor, compute: Compute) -> Operand:
    """Values `[B, H, n, block, D]` rounded to FP8 with a scale a channel of all that the call sees, and dequantized.

    With `compute.smooth_v` their mean is subtracted before and kept apart, as `Operand.mean`.
    """
    mean = masked_mean(x, visible) if compute.smooth_v else torch.zeros_like(x[:, :, :1, :1])
    centered = torch.where(visible, x - mean, 0.0)
    largest = torch.finfo(FP8[compute.pv]).max
    scale = centered.abs().amax((2, 3), keepdim=True) / largest
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
    codes = (centered / torch.where(scale == 0, 1.0, scale)).clamp(-largest, largest)
    v_mean = mean.expand(-1, -1, x.shape[2], -1, -1) if compute.smooth_v else None
    return Operand(rounded(codes, compute.pv) * scale, None, v_mean)
