"""A panel with codes where the call multiplies codes: launches of `prefill/quantize.py`."""

from __future__ import annotations

import torch

from qattn_kernels.groups import QUERY_BLOCK
from qattn_kernels.layout import Window
from qattn_kernels.panel import Panel
from qattn_kernels.prefill.operands import FP8, fp8_values
from qattn_kernels.prefill.quantize import FIELDS, TILE, keys_kernel, settle_kernel, stats_kernel, values_kernel
from qattn_kernels.queries import query_mean
from qattn_kernels.rows import real_first
from qattn_kernels.sizes import power_of_two
from qattn_kernels.spec import Compute, LayerSpec

STEP = 128  # slots of a program that gathers statistics


def coded_panel(q: torch.Tensor, panel: Panel, spec: LayerSpec, scale: float) -> Panel:
    """`panel` with keys in INT8 and values in FP8 or INT8, if `spec.compute` multiplies those and it has none.

    Args:
        q: `[B, Hq, T, D]`, whose means smoothing takes. scale: of the scores.
        panel: what gets codes may have fewer slots than `bias`, if none beyond is seen, and any strides but the last.
    """
    compute = spec.compute
    if compute.prefill != "int8":
        return panel
    if panel.k_scale is None:
        panel = _with_keys(q, panel, compute, spec.window, scale)
    if fp8_values(compute):
        panel = _with_fp8_values(panel, compute, spec.window)
    elif compute.pv == "int8" and panel.v_scale is None:
        codes, scales = _empty_values(panel, torch.int8), torch.empty_like(panel.bias)
        _values(panel, panel.bias, panel.bias, codes, scales, False, False, spec.window)
        panel = panel._replace(v=codes, v_scale=scales)
    return panel


def _statistics(
    x: torch.Tensor, panel: Panel, largest: float, smooth: bool, window: Window
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp32 `[B, H, D]` twice: the mean of all visible tokens (zeros unless `smooth`), and scales around it; and int32
    `[B * H]`, the first masked slot."""
    batch, heads, _, dim = x.shape
    slots = panel.bias.shape[2]
    parts, dp = -(-slots // STEP), power_of_two(dim)
    stats = torch.empty((batch * heads, parts, FIELDS, dim), dtype=torch.float32, device=x.device)
    stats_kernel[(parts, batch * heads)](
        x, *x.stride()[:3], panel.bias, panel.rows, stats, heads, slots, D=dim, DP=dp, STEP=STEP, BLOCK=window.block
    )
    mean, scale = (torch.empty((batch, heads, dim), dtype=torch.float32, device=x.device) for _ in range(2))
    clean = torch.empty(batch * heads, dtype=torch.int32, device=x.device)
    settle_kernel[(batch * heads,)](stats, mean, scale, clean, parts, largest, D=dim, DP=dp, CHUNK=32, SMOOTH=smooth)
    return mean, scale, clean


def _with_keys(q: torch.Tensor, panel: Panel, compute: Compute, window: Window, scale: float) -> Panel:
    batch, heads, _, dim = panel.k.shape
    slots = panel.bias.shape[2]
    mean = _statistics(panel.k, panel, 1.0, True, window)[0] if compute.smooth_k else None
    codes = torch.empty((batch, heads, slots, dim), dtype=torch.int8, device=panel.k.device)
    scales = torch.empty_like(panel.bias)
    keys_kernel[(-(-slots // TILE.value), batch * heads)](
        panel.k, *panel.k.stride()[:3], panel.bias, panel.rows, panel.bias if mean is None else mean, codes, scales,
        heads, slots, LEVELS=compute.qk_levels, GROUP=compute.k_scale, SMOOTH=mean is not None, D=dim,
        DP=power_of_two(dim), BLOCK=window.block,
    )  # fmt: skip
    shift = q_mean = None
    if compute.smooth_q != "none":
        q_mean = _query_means(q, panel, compute)
        shift = torch.nn.functional.pad(_shift(q_mean, panel.k, mean, scale), (0, slots - panel.k.shape[2]))
    return panel._replace(k=codes, k_scale=scales, k_mean=mean, q_mean=q_mean, shift=shift)


def _query_means(q: torch.Tensor, panel: Panel, compute: Compute) -> torch.Tensor:
    """fp32 `[B, Hq, n, D]`: of each block of queries, or n = 1, of all."""
    span = panel.rows[:, 4:6]
    real = torch.arange(q.shape[2], device=q.device) < span[:, 1:]
    first = torch.where(real[:, None, :, None], real_first(q, span).float(), 0.0)
    means = query_mean(first, compute.smooth_q, real)
    assert means is not None
    return means[:, :, :: q.shape[2] if compute.smooth_q == "tensor" else QUERY_BLOCK].contiguous()


def _shift(q_mean: torch.Tensor, k: torch.Tensor, mean: torch.Tensor | None, scale: float) -> torch.Tensor:
    """fp32 `[B, Hq, n, N]`: scores of the mean queries with the keys as they are, around their mean. Slots that nobody
    sees hold anything."""
    heads = k.shape[1]
    by_head = (q_mean * scale).unflatten(1, (heads, -1)).flatten(2, 3)
    shift = by_head @ k.float().transpose(-1, -2)
    if mean is not None:
        shift -= by_head @ mean[..., None]
    return shift.unflatten(2, (-1, q_mean.shape[2])).flatten(1, 2).contiguous()


def _empty_values(panel: Panel, dtype: torch.dtype) -> torch.Tensor:
    batch, heads, _, dim = panel.v.shape
    return torch.empty((batch, heads, dim, panel.bias.shape[2]), dtype=dtype, device=panel.v.device)


def _with_fp8_values(panel: Panel, compute: Compute, window: Window) -> Panel:
    largest = torch.finfo(FP8[compute.pv]).max
    mean, channel, clean = _statistics(panel.v, panel, largest, compute.smooth_v, window)
    codes = _empty_values(panel, torch.uint8)
    _values(panel, mean, channel, codes, panel.bias, True, compute.smooth_v, window)
    return panel._replace(v=codes, v_channel=channel, v_mean=mean if compute.smooth_v else None, clean=clean)


def _values(
    panel: Panel,
    mean: torch.Tensor,
    channel: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    fp8: bool,
    smooth: bool,
    window: Window,
) -> None:
    batch, heads, _, dim = panel.v.shape
    slots = panel.bias.shape[2]
    values_kernel[(-(-slots // TILE.value), batch * heads)](
        panel.v, *panel.v.stride()[:3], panel.bias, panel.rows, mean, channel, codes, scales, heads, slots, FP8=fp8,
        SMOOTH=smooth, D=dim, DP=power_of_two(dim), BLOCK=window.block,
    )  # fmt: skip
