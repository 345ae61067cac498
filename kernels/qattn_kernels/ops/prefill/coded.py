"""Unpacked keys and values with codes where the call multiplies codes: launches of `ops/prefill/quantize.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from qattn_kernels.formats.granularity import QUERY_BLOCK
from qattn_kernels.launch.constants import power_of_two
from qattn_kernels.launch.launches import launch
from qattn_kernels.launch.unpacked_kv import UnpackedKV
from qattn_kernels.layer.spec import Compute, LayerSpec
from qattn_kernels.layout import Window
from qattn_kernels.ops.prefill.quantize import (
    FIELDS,
    TILE,
    keys_kernel,
    query_means_kernel,
    settle_kernel,
    stats_kernel,
    values_kernel,
)
from qattn_kernels.reference.operands import FP8, fp8_values

STEP = 256  # slots of a program that gathers statistics


class _Statistics(NamedTuple):
    """fp32 `[sides, B, H, D]`: means of all visible keys and values (zeros where they are not smoothed), and scales
    around them; int32 `[B * H]`, the first masked slot."""

    mean: torch.Tensor
    scale: torch.Tensor
    clean: torch.Tensor


def with_codes(q: torch.Tensor, unpacked: UnpackedKV, spec: LayerSpec, scale: float) -> UnpackedKV:
    """`unpacked` with keys in INT8 and values in FP8 or INT8, if `spec.compute` multiplies those and it has none.

    Args:
        q: `[B, Hq, T, D]`, whose means smoothing takes. scale: of the scores.
        unpacked: what gets codes may have fewer slots than `bias`, if none beyond is seen, and any strides but the
            last.
    """
    compute = spec.compute
    if compute.prefill != "int8":
        return unpacked
    statistics = None
    if fp8_values(compute) or (compute.smooth_k and unpacked.k_scale is None):
        statistics = _statistics(unpacked, compute, spec.window)
    if unpacked.k_scale is None:
        mean = statistics.mean[0] if statistics is not None and compute.smooth_k else None
        unpacked = _with_keys(q, unpacked, compute, spec.window, mean, scale)
    if fp8_values(compute):
        assert statistics is not None
        return _with_fp8_values(unpacked, statistics, compute, spec.window)
    if compute.pv == "int8" and unpacked.v_scale is None:
        codes, scales = _empty_values(unpacked, torch.int8), torch.empty_like(unpacked.bias)
        _values(unpacked, unpacked.bias, unpacked.bias, codes, scales, False, False, spec.window)
        unpacked = unpacked._replace(v=codes, v_scale=scales)
    return unpacked


def _statistics(unpacked: UnpackedKV, compute: Compute, window: Window) -> _Statistics:
    """Statistics of what the unpacked keys and values have in the model's precision: keys alone where values are not
    made FP8."""
    batch, heads, slots = unpacked.bias.shape
    fp8 = fp8_values(compute)
    k, v = unpacked.k if unpacked.k_scale is None else unpacked.v, unpacked.v if fp8 else unpacked.k
    dim, sides, parts = k.shape[-1], 2 if fp8 else 1, -(-slots // STEP)
    sizes = {"D": dim, "DP": power_of_two(dim)}

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=k.device)

    stats = empty(sides, batch * heads, parts, FIELDS.value, dim)
    launch(
        stats_kernel, (parts, batch * heads, sides),
        k, v, k.stride()[:3], v.stride()[:3], unpacked.bias, unpacked.rows, stats, heads, slots,
        **sizes, STEP=STEP, BLOCK=window.block, SMOOTH_V=compute.smooth_v, num_warps=8,
        enable_fp_fusion=True,
    )  # fmt: skip
    mean, scale = empty(sides, batch, heads, dim), empty(sides, batch, heads, dim)
    clean = torch.empty(batch * heads, dtype=torch.int32, device=k.device)
    largest = torch.finfo(FP8[compute.pv]).max if fp8 else 1.0
    launch(
        settle_kernel, (batch * heads, sides),
        stats, mean, scale, clean, parts, largest, **sizes, CHUNK=32, SMOOTH_K=int(compute.smooth_k),
        SMOOTH_V=int(compute.smooth_v), enable_fp_fusion=True,
    )  # fmt: skip
    return _Statistics(mean, scale, clean)


def _with_keys(
    q: torch.Tensor, unpacked: UnpackedKV, compute: Compute, window: Window, mean: torch.Tensor | None, scale: float
) -> UnpackedKV:
    (batch, heads, slots), dim = unpacked.bias.shape, unpacked.k.shape[3]
    codes = torch.empty((batch, heads, slots, dim), dtype=torch.int8, device=unpacked.k.device)
    scales = torch.empty_like(unpacked.bias)
    launch(
        keys_kernel, (-(-slots // TILE.value), batch * heads),
        unpacked.k, unpacked.k.stride()[:3], unpacked.bias, unpacked.rows, unpacked.bias if mean is None else mean,
        codes, scales, heads, slots, LEVELS=compute.qk_levels, GROUP=compute.k_scale, SMOOTH=mean is not None, D=dim,
        DP=power_of_two(dim), BLOCK=window.block, enable_fp_fusion=True,
    )  # fmt: skip
    shift = q_mean = None
    if compute.smooth_q != "none":
        q_mean = _query_means(q, unpacked, compute)
        shift = torch.nn.functional.pad(_shift(q_mean, unpacked.k, mean, scale), (0, slots - unpacked.k.shape[2]))
    return unpacked._replace(k=codes, k_scale=scales, k_mean=mean, q_mean=q_mean, shift=shift)


def _query_means(q: torch.Tensor, unpacked: UnpackedKV, compute: Compute) -> torch.Tensor:
    """fp32 `[B, Hq, n, D]`: means of each block of real queries, or n = 1, of all."""
    batch, heads, tokens, dim = q.shape
    together = compute.smooth_q == "tensor"
    parts = -(-tokens // QUERY_BLOCK)
    means = torch.empty((batch, heads, parts, dim), dtype=torch.float32, device=q.device)
    launch(
        query_means_kernel, (batch * heads, parts),
        q, q.stride()[:3], unpacked.rows, means, heads, D=dim, DP=power_of_two(dim), SIZE=QUERY_BLOCK,
        TOGETHER=together, enable_fp_fusion=True,
    )  # fmt: skip
    return means.sum(2, keepdim=True) if together else means


def _shift(q_mean: torch.Tensor, k: torch.Tensor, mean: torch.Tensor | None, scale: float) -> torch.Tensor:
    """fp32 `[B, Hq, n, N]`: scores of the mean queries with the keys as they are, around their mean. Slots that nobody
    sees hold any finite number, whatever key lies there."""
    heads = k.shape[1]
    by_head = (q_mean * scale).unflatten(1, (heads, -1)).flatten(2, 3)
    shift = by_head @ k.nan_to_num(0.0, 0.0, 0.0).float().transpose(-1, -2)
    if mean is not None:
        shift -= by_head @ mean[..., None]
    return shift.unflatten(2, (-1, q_mean.shape[2])).flatten(1, 2).contiguous()


def _empty_values(unpacked: UnpackedKV, dtype: torch.dtype) -> torch.Tensor:
    (batch, heads, slots), dim = unpacked.bias.shape, unpacked.v.shape[3]
    return torch.empty((batch, heads, dim, slots), dtype=dtype, device=unpacked.v.device)


def _with_fp8_values(unpacked: UnpackedKV, statistics: _Statistics, compute: Compute, window: Window) -> UnpackedKV:
    mean, channel = statistics.mean[1], statistics.scale[1]
    codes = _empty_values(unpacked, torch.uint8)
    _values(unpacked, mean, channel, codes, unpacked.bias, True, compute.smooth_v, window)
    v_mean = mean if compute.smooth_v else None
    codes = codes.view(torch.float8_e4m3fn)  # bytes, cast inside the product's loop, would go through registers
    return unpacked._replace(v=codes, v_channel=channel, v_mean=v_mean, clean=statistics.clean)


def _values(
    unpacked: UnpackedKV,
    mean: torch.Tensor,
    channel: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    fp8: bool,
    smooth: bool,
    window: Window,
) -> None:
    (batch, heads, slots), dim = unpacked.bias.shape, unpacked.v.shape[3]
    launch(
        values_kernel, (-(-slots // TILE.value), batch * heads),
        unpacked.v, unpacked.v.stride()[:3], unpacked.bias, unpacked.rows, mean, channel, codes, scales, heads, slots,
        FP8=fp8, SMOOTH=smooth, D=dim, DP=power_of_two(dim), BLOCK=window.block, enable_fp_fusion=True,
    )  # fmt: skip
