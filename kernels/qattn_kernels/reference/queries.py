"""Quantize queries to INT8 for products with integer keys, in decode and prefill. Plain PyTorch, the specification."""

from __future__ import annotations

from typing import NamedTuple

import torch

from qattn_kernels.formats import Operand
from qattn_kernels.formats.base import int8_tokens
from qattn_kernels.formats.granularity import QUERY_BLOCK, grouped_maximum, query_groups
from qattn_kernels.layer.spec import Compute


class Queries(NamedTuple):
    """Queries of a call.

    Attributes:
        exact: fp32 `[B, Hq, T, D]`, multiplied by the softmax scale; zeros for padding.
        coded: INT8 codes of `exact`, or of `exact - mean`, with one scale per token; None without integer products.
        broken: bool `[B, Hq, T]`, non-finite queries. They count as zeros in scales and means, and their output is NaN.
        mean: fp32 `[B, Hq, T, D]`, mean that smoothing subtracted before quantization; None without smoothing.
    """

    exact: torch.Tensor
    coded: Operand | None
    broken: torch.Tensor
    mean: torch.Tensor | None = None

    def part(self, start: int, end: int) -> Queries:
        """Return the queries from `start` to `end` (exclusive)."""
        coded = None if self.coded is None else self.coded.map(lambda x: x[:, :, start:end])
        mean = None if self.mean is None else self.mean[:, :, start:end]
        return Queries(self.exact[:, :, start:end], coded, self.broken[:, :, start:end], mean)


def _finite(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `Queries.exact` and `Queries.broken` of `q` `[B, Hq, T, D]`."""
    broken = ~q.isfinite().all(-1)
    return torch.where(broken[..., None], 0.0, q.float() * scale), broken


def short_queries(q: torch.Tensor, scale: float, compute: Compute) -> Queries:
    """Return the queries `[B, Hq, T, D]` of a decode, each with a separate INT8 scale.

    A decode does not smooth queries: a single query equals its mean."""
    exact, broken = _finite(q, scale)
    return Queries(exact, int8_tokens(exact, compute.decode_levels) if compute.decode == "int8" else None, broken)


def long_queries(
    q: torch.Tensor, scale: float, compute: Compute, real: torch.Tensor, mean: torch.Tensor | None = None
) -> Queries:
    """Return the queries of a prefill, smoothed and quantized as `compute` says.

    Args:
        q: `[B, Hq, T, D]`.
        scale: softmax scale.
        compute: the layer's arithmetic.
        real: bool `[B, T]`, false after the last query of a row.
        mean: fp32 `[B, Hq, 1, D]`, mean to subtract instead of the mean of these queries.
    """
    exact, broken = _finite(q, scale)
    exact = torch.where(real[:, None, :, None], exact, 0.0)  # padding must not raise a scale
    if compute.prefill != "int8":
        return Queries(exact, None, broken)
    mean = query_mean(exact, compute.smooth_q, real) if mean is None else mean.expand_as(exact)
    left_out = broken | ~real[:, None]
    centered = exact if mean is None else torch.where(left_out[..., None], 0.0, exact - mean)
    return Queries(exact, quantize_queries(centered, compute), broken, mean)


def query_mean(q: torch.Tensor, smooth: str, real: torch.Tensor) -> torch.Tensor | None:
    """Return the means, fp32 `[B, Hq, T, D]`, that smoothing subtracts from each query, or None for `none`.

    With `tensor`, it is the mean of all real queries of the head; with `block`, the mean of the query's `QUERY_BLOCK`.
    Means are rounded from fp64, so that summation order does not matter."""
    if smooth == "none":
        return None
    size = q.shape[2] if smooth == "tensor" else QUERY_BLOCK
    pad = -q.shape[2] % size
    blocks = torch.nn.functional.pad(q, (0, 0, 0, pad)).unflatten(2, (-1, size))
    count = torch.nn.functional.pad(real, (0, pad)).unflatten(1, (-1, size)).sum(2).clamp(min=1)
    mean = (blocks.double().sum(3) / count[:, None, :, None]).float()
    return mean.repeat_interleave(size, 2)[:, :, : q.shape[2]]


def quantize_queries(q: torch.Tensor, compute: Compute) -> Operand:
    """Quantize queries `[B, Hq, T, D]` to symmetric INT8 codes up to `compute.qk_levels`.

    Queries share scales as `compute.q_scale` says. A shared scale is repeated for each query of its group."""
    own = int8_tokens(q, compute.qk_levels)
    if compute.q_scale == "token":
        return own
    groups = query_groups(compute.q_scale, q.shape[2], q.device, compute.block_q)
    top = grouped_maximum(q.abs().amax(-1), groups)
    scale = top / torch.full_like(top, compute.qk_levels)
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
    codes = torch.round(q / torch.where(scale == 0, 1.0, scale)[..., None])
    return Operand(codes.clamp(-compute.qk_levels, compute.qk_levels).to(torch.int8), scale)
