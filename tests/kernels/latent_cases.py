"""Layers of latent attention (MLA) fed by hand, for the tests of their kernels. `step` feeds any layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from helpers import DEVICE, Case

from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.methods import get_method
from qattn_hf.model.latent import layer_spec
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.step.kernels import fused_step

INT8: Case = ("int8", {})
TURBO: Case = ("turbo", {})
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Step = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Sizes(NamedTuple):
    """Channels of the latent and of the RoPE part, and query heads."""

    latent: int = 64
    rope: int = 16
    heads: int = 4


def spec_of(case: Case, impl: str = "reference") -> LayerSpec:
    settings = get_method(case[0])(**case[1])
    return replace(layer_spec(settings.without_default_pool(settings.last_layer_spec(1)), case[0]), impl=impl)


SMALL = Sizes()


def make_layer(case: Case, capacity: int = 256, impl: str = "reference") -> QAttnLayer:
    return QAttnLayer(spec_of(case, impl), capacity)


def inputs(rows: int, tokens: int, sizes: Sizes = SMALL, seed: int = 0) -> Inputs:
    """Absorbed queries, RoPE parts (K) and latents (V), with channels that stand out as in real ones."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, sizes.heads, tokens, sizes.latent + sizes.rope, generator=g)
    k, v = (torch.randn(rows, 1, tokens, dim, generator=g) for dim in (sizes.rope, sizes.latent))
    k[..., 3] *= 5
    v[..., 5] += 4
    return q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)


def step(
    run: Step,
    layer: QAttnLayer,
    qkv: Inputs,
    start: int,
    end: int,
    padding: int = 0,
    scores: Scores | None = None,
    after: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one call over columns `start` to `end`.

    Row 0 has `padding` on the left, the last row `after` on the right. Returns outputs and log-sum-exp.
    """
    q, k, v = (x[:, :, start:end] for x in qkv)
    if not layer.is_initialized:
        layer.lazy_initialization(k, v)
    span = torch.tensor([[0, end - start]] * len(q), dtype=torch.int32)
    span[0] += torch.tensor([padding, -padding], dtype=torch.int32)
    span[-1, 1] -= after
    args: tuple[Any, ...] = (q, k, v, span.to(DEVICE), layer.state, layer.spec, scores or Scores(q.shape[-1] ** -0.5))
    return run(*args, *([layer.blocks] if run is fused_step else []))


def feed(
    run: Step, layer: QAttnLayer, qkv: Inputs, cuts: list[int], first: int = 0, scores: Scores | None = None
) -> list[torch.Tensor]:
    """Outputs and log-sum-exp of calls that end at `cuts`; row 0 begins with `first` columns of padding."""
    out, start = [], 0
    for end in cuts:
        out += step(run, layer, qkv, start, end, min(max(first - start, 0), end - start), scores)
        start = end
    return out


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    a, b = a[a.isfinite()], b[b.isfinite()]
    return ((a - b).norm() / b.norm()).item()
