"""Latent attention (MLA) in Triton against its specification: the same state bit for bit, outputs within what products
in fp16 cost. Without a GPU in Triton's interpreter: few heads, short contexts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from helpers import DEVICE, Case, case_id

from qattn_hf.handle import Handle
from qattn_hf.latent import layer_spec
from qattn_hf.layer import QAttnLayer
from qattn_hf.methods import get_method
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.support import unsupported
from qattn_kernels.ops.crop.reference import crop
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.reference import reference_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
ON_GPU = DEVICE == "cuda"
INT8: Case = ("int8", {})
TURBO: Case = ("turbo", {})
CASES: list[Case] = [
    INT8,
    TURBO,
    ("turbo", {"bits": 2}),
    ("turbo", {"k_bits": 4, "v_bits": 2, "buffer_size": 128}),
    ("turbo", {"k_bits": 2, "v_bits": 4, "v_scale": "token"}),
    ("turbo", {"softmax": "sas", "sas_threshold": -1e9}),
    ("kivi", {"bits": 4, "group_size": 64, "residual_length": 20}),
    ("kivi", {"bits": 2, "group_size": 32, "residual_length": 0}),
    ("none", {}),
    ("fp8", {}),
    ("nf4", {}),
]


class Sizes(NamedTuple):
    """Channels of the latent and of the RoPE part, and query heads."""

    latent: int = 64
    rope: int = 16
    heads: int = 4


def make_layer(case: Case, capacity: int = 256, **changes) -> QAttnLayer:
    spec = layer_spec(get_method(case[0])(**case[1]).last_layer_spec(1), case[0])
    return QAttnLayer(replace(spec, **changes), capacity)


def inputs(rows: int, tokens: int, sizes: Sizes = Sizes(), seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Absorbed queries, RoPE parts (K) and latents (V), with channels that stand out as in real ones."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, sizes.heads, tokens, sizes.latent + sizes.rope, generator=g)
    k, v = (torch.randn(rows, 1, tokens, dim, generator=g) for dim in (sizes.rope, sizes.latent))
    k[..., 3] *= 5
    v[..., 5] += 4
    return q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)


def step(run, layer: QAttnLayer, qkv, start: int, end: int, padding: int = 0, scores: Scores | None = None):
    """One call of columns `start` to `end`, of which row 0 has `padding` on the left: outputs and log-sum-exp."""
    q, k, v = (x[:, :, start:end] for x in qkv)
    if not layer.is_initialized:
        layer.lazy_initialization(k, v)
    span = torch.tensor([[0, end - start]] * len(q), dtype=torch.int32)
    span[0] += torch.tensor([padding, -padding], dtype=torch.int32)
    args = (q, k, v, span.to(DEVICE), layer.state, layer.spec, scores or Scores(q.shape[-1] ** -0.5))
    return run(*args, *([layer.blocks] if run is fused_step else []))


def feed(run, layer: QAttnLayer, qkv, cuts: list[int], first: int = 0, scores: Scores | None = None) -> list:
    """Outputs of calls that end at `cuts`; row 0 begins with `first` columns of padding."""
    out, start = [], 0
    for end in cuts:
        out += step(run, layer, qkv, start, end, min(max(first - start, 0), end - start), scores)
        start = end
    return out


def differing(a: QAttnLayer, b: QAttnLayer) -> list[str]:
    return [name for name in a.state if not torch.equal(a.state[name], b.state[name])]


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    a, b = a[a.isfinite()], b[b.isfinite()]
    return ((a - b).norm() / b.norm()).item()


def check(case: Case, qkv, cuts: list[int], first: int = 0, scores: Scores | None = None) -> None:
    one, other = make_layer(case), make_layer(case)
    want = feed(reference_step, one, qkv, cuts, first, scores)
    got = feed(fused_step, other, qkv, cuts, first, scores)
    assert differing(one, other) == []
    # queries and weights in fp16 beside codes; SAS's polynomials are each other's within 1e-3; else the order of sums
    limit = 2e-3 if case[1].get("softmax") else 1e-3 if one.spec.v.integer else 1e-5
    assert max(map(error, got, want)) < limit


@pytest.mark.product("int8")
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_state_and_outputs_are_the_references(case: Case):
    """Long and short calls, padding, tokens that are not finite, blocks that close in each kind of call."""
    qkv = inputs(2, 200)
    qkv[1][1, 0, 30, 1] = math.nan
    qkv[2][0, 0, 61, 2] = math.inf
    check(case, qkv, [62, 63, 65, 129, 130, 162, 200], first=5)
