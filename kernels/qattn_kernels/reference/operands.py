"""Operands of a prefill, quantized for one call if the cache does not quantize them: SageAttention2 over any cache.

Keys minus their mean become INT8 or INT4 with one scale per group of tokens (sections 3.2 and 3.3). Values become FP8
with one scale per channel (section 3.5). This is the specification; `papers/sage_attention.py` has the whole algorithm.
"""

from __future__ import annotations

import torch

from qattn_kernels.formats import Operand
from qattn_kernels.formats.granularity import shared_maximum
from qattn_kernels.layer.spec import Compute, LayerSpec
from qattn_kernels.reference.tiles import FOREVER, Tiles

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def fp8_values(compute: Compute) -> bool:
    """Return whether a prefill with this `Compute` multiplies weights and values in FP8."""
    return compute.prefill == "int8" and compute.pv in FP8


def rounded(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Round fp32 `x`, within the range of the FP8 format `kind` (`e4m3`, `e5m2`), to that format."""
    return x.to(FP8[kind]).float()


def operands(tiles: Tiles, spec: LayerSpec) -> Tiles:
    """Quantize the `tiles` that a call sees, if `spec.compute` multiplies codes and the format has none.

    Smoothed keys keep their mean as `k.mean`, and the unquantized remainder as `k_exact`."""
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
    """Return the mean `[B, H, 1, 1, D]` of the `visible` tokens of `[B, H, n, block, D]`.

    Summed in fp64, so that the rounded mean does not depend on summation order. A padded row then has the same codes as
    the row alone."""
    count = visible.sum((2, 3), keepdim=True).clamp(min=1)
    return (torch.where(visible, x, 0.0).double().sum((2, 3), keepdim=True) / count).float()


def quantize_keys(x: torch.Tensor, compute: Compute) -> Operand:
    """Quantize keys `[B, H, n, block, D]` to symmetric INT8 codes up to `compute.qk_levels`.

    Tokens share scales as `compute.k_scale` says."""
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
    """Round values `[B, H, n, block, D]` to FP8 with one scale per channel, and dequantize them.

    A scale covers all visible tokens. With `compute.smooth_v`, their mean is subtracted first and returned as
    `Operand.mean`."""
    mean = masked_mean(x, visible) if compute.smooth_v else torch.zeros_like(x[:, :, :1, :1])
    centered = torch.where(visible, x - mean, 0.0)
    largest = torch.finfo(FP8[compute.pv]).max
    scale = centered.abs().amax((2, 3), keepdim=True) / largest
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
    codes = (centered / torch.where(scale == 0, 1.0, scale)).clamp(-largest, largest)
    v_mean = mean.expand(-1, -1, x.shape[2], -1, -1) if compute.smooth_v else None
    return Operand(rounded(codes, compute.pv) * scale, None, v_mean)
