"""Quantize unpacked keys and values for calls that multiply INT8 or FP8; launches `ops/prefill/quantize.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from qattn_kernels.formats.granularity import QUERY_BLOCK
from qattn_kernels.launch.constants import power_of_two
from qattn_kernels.launch.launches import launch
from qattn_kernels.launch.options import warps_of
from qattn_kernels.launch.unpacked_kv import UnpackedKV
from qattn_kernels.layer.spec import Compute, LayerSpec
from qattn_kernels.layout import Window
from qattn_kernels.ops.prefill.quantize import (
    FIELDS,
    TILE,
    CodeSizes,
    codes_kernel,
    query_means_kernel,
    settle_kernel,
    stats_kernel,
)
from qattn_kernels.reference.operands import FP8, fp8_values

STEP = 256  # slots per program of `stats_kernel`


class _Statistics(NamedTuple):
    """Statistics of visible keys and values.

    Attributes:
        mean: fp32 `[sides, B, H, D]`, means, zeros where a side is not smoothed.
        scale: fp32 `[sides, B, H, D]`, scales around the means.
        clean: int32 `[B * H]`, the first masked slot.
    """

    mean: torch.Tensor
    scale: torch.Tensor
    clean: torch.Tensor


def with_codes(q: torch.Tensor, unpacked: UnpackedKV, spec: LayerSpec, scale: float) -> UnpackedKV:
    """Return `unpacked` with INT8 keys and FP8 or INT8 values, if `spec.compute` multiplies them quantized.

    Sides that are already quantized stay as they are.

    Args:
        q: `[B, Hq, T, D]`; smoothing uses the queries' means.
        unpacked: a side to quantize may have fewer slots than `bias`, if no later slot is visible, and any strides but
            the last.
        spec: the layer's formats and arithmetic.
        scale: scale of the scores.
    """
    compute = spec.compute
    if compute.prefill != "int8":
        return unpacked
    statistics, fp8 = None, fp8_values(compute)
    if fp8 or (compute.smooth_k and unpacked.k_scale is None):
        statistics = _statistics(unpacked, compute, spec.window)
    keys = _empty_keys(unpacked, statistics, compute) if unpacked.k_scale is None else None
    values = None
    if fp8 or (compute.pv == "int8" and unpacked.v_scale is None):
        values = _empty_values(unpacked, statistics, fp8)
    _write_codes(unpacked, keys, values, compute, spec.window)
    made = unpacked if keys is None else _with_keys(q, unpacked, keys, compute, scale)
    if values is not None:
        *_, v_mean, channel, codes, scales = values
        if not fp8:
            return made._replace(v=codes, v_scale=scales)
        assert statistics is not None
        codes = codes.view(torch.float8_e4m3fn)  # casting bytes inside the product's loop would pass through registers
        v_mean = v_mean if compute.smooth_v else None
        made = made._replace(v=codes, v_channel=channel, v_mean=v_mean, clean=statistics.clean)
    return made


def _with_keys(q: torch.Tensor, unpacked: UnpackedKV, keys: tuple, compute: Compute, scale: float) -> UnpackedKV:
    """Return `unpacked` with quantized `keys`, and with the means of queries that the call subtracts."""
    *_, k_mean, codes, scales = keys
    k_mean = k_mean if compute.smooth_k else None
    q_mean = shift = None
    if compute.smooth_q != "none":
        q_mean = _query_means(q, unpacked, compute)
        shift = _shift(q_mean, unpacked.k, k_mean, scale)
        shift = torch.nn.functional.pad(shift, (0, unpacked.bias.shape[2] - unpacked.k.shape[2]))
    return unpacked._replace(k=codes, k_scale=scales, k_mean=k_mean, q_mean=q_mean, shift=shift)


def _write_codes(
    unpacked: UnpackedKV, keys: tuple | None, values: tuple | None, compute: Compute, window: Window
) -> None:
    """Quantize keys, values or both in one kernel launch."""
    (batch, heads, slots), x = unpacked.bias.shape, unpacked.v if keys is None else unpacked.k
    sides = (keys is not None) + (values is not None)
    if sides:
        smooth, dim = (compute.smooth_k, compute.smooth_v), x.shape[3]
        size = CodeSizes(compute.qk_levels, compute.k_scale, *smooth, fp8_values(compute), dim, power_of_two(dim),
                         window.block)  # fmt: skip
        launch(
            codes_kernel, (-(-slots // TILE.value), batch * heads, sides),
            keys, values, unpacked.bias, unpacked.rows, heads, slots, C=size, num_warps=warps_of(dim, 4),
            enable_fp_fusion=True,
        )  # fmt: skip


def _statistics(unpacked: UnpackedKV, compute: Compute, window: Window) -> _Statistics:
    """Compute the statistics of unquantized keys, and of values if they become FP8."""
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
        (k, k.stride()[:3]), (v, v.stride()[:3]), unpacked.bias, unpacked.rows, stats, heads, slots,
        **sizes, STEP=STEP, BLOCK=window.block, SMOOTH_V=compute.smooth_v, num_warps=warps_of(dim, 8),
        enable_fp_fusion=True,
    )  # fmt: skip
    mean, scale = empty(sides, batch, heads, dim), empty(sides, batch, heads, dim)
    clean = torch.empty(batch * heads, dtype=torch.int32, device=k.device)
    largest = torch.finfo(FP8[compute.pv]).max if fp8 else 1.0
    launch(
        settle_kernel, (batch * heads, sides),
        stats, mean, scale, clean, parts, largest, **sizes, CHUNK=32, SMOOTH_K=int(compute.smooth_k),
        SMOOTH_V=int(compute.smooth_v), num_warps=warps_of(dim, 4), enable_fp_fusion=True,
    )  # fmt: skip
    return _Statistics(mean, scale, clean)


def _empty_keys(unpacked: UnpackedKV, statistics: _Statistics | None, compute: Compute) -> tuple:
    """Return the `KEYS` of `codes_kernel`, with uninitialised outputs."""
    (batch, heads, slots), k = unpacked.bias.shape, unpacked.k
    mean = unpacked.bias  # placeholder, not read
    if compute.smooth_k:
        assert statistics is not None
        mean = statistics.mean[0]
    codes = torch.empty((batch, heads, slots, k.shape[3]), dtype=torch.int8, device=k.device)
    return k, k.stride()[:3], mean, codes, torch.empty_like(unpacked.bias)


def _empty_values(unpacked: UnpackedKV, statistics: _Statistics | None, fp8: bool) -> tuple:
    """Return the `VALUES` of `codes_kernel`, with uninitialised outputs."""
    (batch, heads, slots), v = unpacked.bias.shape, unpacked.v
    shape = batch, heads, v.shape[3], slots
    if not fp8:
        codes = torch.empty(shape, dtype=torch.int8, device=v.device)
        return v, v.stride()[:3], unpacked.bias, unpacked.bias, codes, torch.empty_like(unpacked.bias)
    assert statistics is not None
    codes = torch.empty(shape, dtype=torch.uint8, device=v.device)
    return v, v.stride()[:3], statistics.mean[1], statistics.scale[1], codes, unpacked.bias


def _query_means(q: torch.Tensor, unpacked: UnpackedKV, compute: Compute) -> torch.Tensor:
    """Return fp32 means `[B, Hq, n, D]` of each block of real queries, or of all of them with n = 1."""
    batch, heads, tokens, dim = q.shape
    together = compute.smooth_q == "tensor"
    parts = -(-tokens // QUERY_BLOCK)
    means = torch.empty((batch, heads, parts, dim), dtype=torch.float32, device=q.device)
    launch(
        query_means_kernel, (batch * heads, parts),
        q, q.stride()[:3], unpacked.rows, means, heads, D=dim, DP=power_of_two(dim), SIZE=QUERY_BLOCK,
        TOGETHER=together, num_warps=warps_of(dim, 4), enable_fp_fusion=True,
    )  # fmt: skip
    return means.sum(2, keepdim=True) if together else means


def _shift(q_mean: torch.Tensor, k: torch.Tensor, mean: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Return scores fp32 `[B, Hq, n, N]` of the mean queries with the unquantized keys, relative to the keys' mean.

    Masked slots hold some finite number, even if their key is not finite."""
    heads = k.shape[1]
    by_head = (q_mean * scale).unflatten(1, (heads, -1)).flatten(2, 3)
    shift = by_head @ k.nan_to_num(0.0, 0.0, 0.0).float().transpose(-1, -2)
    if mean is not None:
        shift -= by_head @ mean[..., None]
    return shift.unflatten(2, (-1, q_mean.shape[2])).flatten(1, 2).contiguous()
