"""Prompts of latent attention (MLA) over expanded keys and values.

The cache equals that written by kernels, and the output that of the specification over the stored values.
"""

from __future__ import annotations

import math

import pytest
import torch
from helpers import DEVICE, Case, case_id
from latent_cases import INT8, SMALL, TURBO, error, inputs, spec_of
from test_fused_kernels import differing

from qattn_hf.layer.handle import Handle
from qattn_hf.layer.latent_layer import LatentLayer
from qattn_kernels.layer.scores import Scores
from qattn_kernels.ops.latent.up import UpProjections
from qattn_kernels.step import latent_prompt
from qattn_kernels.step.latent_prompt import by_expansion

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
NOPE, VALUE = 24, 40
KIVI: Case = ("kivi", {"bits": 4, "group_size": 64, "residual_length": 20})
CASES: list[Case] = [INT8, TURBO, KIVI, ("none", {})]
# dequantized latents and what is expanded of them in the model's dtype, here fp32; prompts of kernels alone in fp16
CLOSE = 1e-3


def up_of(dtype: torch.dtype = torch.float32) -> UpProjections:
    g = torch.Generator().manual_seed(7)
    sides = (torch.randn(SMALL.heads, dim, SMALL.latent, generator=g) / SMALL.latent**0.5 for dim in (NOPE, VALUE))
    return UpProjections(*(x.to(DEVICE, dtype) for x in sides))


def numbers(rows: int, tokens: int) -> tuple[torch.Tensor, ...]:
    q, k, v = inputs(rows, tokens)
    return q[..., : NOPE + SMALL.rope].contiguous(), k, v


def feed(
    layer: LatentLayer, x: tuple[torch.Tensor, ...], cuts: list[int], padding: int = 0, after: int = 0
) -> list[torch.Tensor]:
    """Outputs of calls that end at `cuts`; row 0 begins with `padding` columns of padding, and the last row's first
    call ends with `after`."""
    out, start, scores = [], 0, Scores((NOPE + SMALL.rope) ** -0.5)
    for end in cuts:
        q, k, v = (part[:, :, start:end] for part in x)
        span = torch.tensor([[0, end - start]] * len(q), dtype=torch.int32, device=DEVICE)
        span[0] += torch.tensor([padding, -padding], dtype=torch.int32, device=DEVICE)
        span[-1, 1] -= after
        if not layer.is_initialized:
            layer.lazy_initialization(k, v)
        out.append(layer.attend_latents(q, Handle(layer, k, v), span, scores, padding == after == 0, up_of()))
        start, padding, after = end, 0, 0
    return out


def both(
    case: Case, x: tuple[torch.Tensor, ...], cuts: list[int], padding: int = 0, after: int = 0
) -> list[list[torch.Tensor]]:
    """Outputs of the specification and of kernels, whose caches are the same."""
    layers = [LatentLayer(spec_of(case, impl), 512) for impl in ("reference", "triton")]
    outputs = [feed(layer, x, cuts, padding, after) for layer in layers]
    assert not differing(*layers)
    assert layers[0].prompt_by == "reference"
    return [*outputs, [layers[1].prompt_by]]


@pytest.mark.product("turbo")
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_prompts_are_the_specifications(case: Case):
    """A first prompt, steps, and a later prompt that sees packed blocks and open tokens."""
    want, got, by = both(case, numbers(2, 260), [150, 151, 160, 260])
    assert max(map(error, got, want)) < CLOSE and by == ["sdpa"]


@pytest.mark.parametrize("case", [INT8, KIVI], ids=case_id)
def test_padding_before_the_tokens_has_zeros_and_is_not_seen(case: Case):
    """Padding after them reads the row."""
    want, got, by = both(case, numbers(2, 140), [100, 140], padding=37, after=50)
    assert max(map(error, got, want)) < CLOSE and by == ["sdpa"]
    assert not got[0][0, :, :37].any() and got[0][1].any(-1).all()


@pytest.mark.parametrize("poison", [0.0], indirect=True)
@pytest.mark.parametrize("padding", [0, 17])
def test_slots_behind_a_rows_end_are_not_seen(padding: int):
    """Memory that is new is often zeros, which in a bias say that a slot holds a token."""
    want, got, by = both(INT8, numbers(2, 100), [40, 100], padding)
    assert max(map(error, got, want)) < CLOSE and by == ["sdpa"]


@pytest.mark.parametrize("cuts", [[100], [40, 100]], ids=["first", "later"])
def test_a_token_that_is_not_finite_stays_masked(cuts: list[int]):
    x = numbers(1, 100)
    x[1][0, 0, 30, 1], x[2][0, 0, 33, 2] = math.nan, math.inf
    want, got, _ = both(TURBO, x, cuts)
    assert max(map(error, got, want)) < CLOSE and all(y.isfinite().all() for y in got)


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels of fp16 are compared in test_latent_cuda.py")
def test_weights_of_another_dtype_under_autocast():
    """As of a model in fp32 under `torch.autocast`: queries and latents have its dtype, the weight has not."""
    x = tuple(part.half() for part in numbers(1, 100))
    with torch.autocast("cpu", torch.float16):
        want, got, by = both(INT8, x, [70, 100])
    assert by == ["sdpa"] and all(y.dtype == torch.float16 for y in got)
    assert max(map(error, got, want)) < 5e-3  # weights of the softmax in fp16, 2^-11, in either


def test_a_first_prompt_needs_no_mask_whatever_its_length(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(latent_prompt, "MOST_MASKED", 1)
    layer, x = LatentLayer(spec_of(TURBO, "triton"), 512), numbers(1, 150)
    feed(layer, x, [80])
    assert layer.prompt_by == "sdpa"
    feed(layer, tuple(part[:, :, 80:] for part in x), [70])
    assert layer.prompt_by == "triton"


def test_what_it_leaves_to_kernels(monkeypatch: pytest.MonkeyPatch):
    q, spec, plain = numbers(1, 100)[0], spec_of(TURBO, "triton"), Scores(0.1)
    assert by_expansion(q, 128, spec, plain)
    assert not by_expansion(q[:, :, :32], 128, spec, plain)  # a short call reads the cache
    assert not by_expansion(q, 128, spec_of(TURBO), plain)
    assert not by_expansion(q, 128, spec_of(("turbo", {"softmax": "sas"}), "triton"), plain)
    for scores in (Scores(0.1, softcap=5.0), Scores(0.1, window=40), Scores(0.1, sinks=torch.zeros(4))):
        assert not by_expansion(q, 128, spec, scores)
    monkeypatch.setattr(latent_prompt, "MOST_MASKED", 100 * 127)  # more would not fit the memory
    assert not by_expansion(q, 128, spec, plain) and by_expansion(q, 0, spec, plain)
