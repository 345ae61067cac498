"""A whole prompt through PyTorch's SDPA: the cache as kernels write it, the output as attention in full precision."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import DEVICE, Case, attention_fp64, case_id, cases, random_ids, tiny_llama
from helpers import make_layer as make
from test_fused_kernels import differing
from test_fused_kernels import inputs as numbers

import qattn_hf
from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.step import Step, Tensors
from qattn_kernels.layer.support import unsupported
from qattn_kernels.step import prompt
from qattn_kernels.step.prompt import by_sdpa

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
TOKENS = 200
SCORES = Scores(0.125)
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter's bf16 is wrong, SDPA's fp32 slow


def make_layer(case: Case, impl: str = "triton") -> QAttnLayer:
    layer = make(case, 512)
    return type(layer)(replace(layer.spec, impl=impl), 512)


def inputs(rows: int, tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    return tuple(x.to(DTYPE) for x in numbers(rows, tokens, group=2, seed=seed))


def step_of(x: torch.Tensor, spec: LayerSpec, scores: Scores) -> Step:
    """A prompt whose queries, keys and values are `x`; nothing is written."""
    return Step(x, x, x, torch.tensor([[0, x.shape[2]]]), Tensors({}, spec), scores)


def served(case: Case) -> bool:
    """Whether SDPA serves a prompt of these settings."""
    x, spec = torch.empty(1, 2, 8192, 64, device=DEVICE, dtype=DTYPE), make_layer(case).spec
    return unsupported(spec, 2, 64, 64) is None and by_sdpa(step_of(x, spec, SCORES))


def attend(layer: QAttnLayer, x: tuple[torch.Tensor, ...], unpadded: bool) -> torch.Tensor:
    q, k, v = x
    span = torch.tensor([[0, q.shape[2]]], dtype=torch.int32, device=DEVICE)
    return layer.attend(q, layer.update(k, v)[0], span, SCORES, unpadded)[0]


@pytest.fixture(autouse=True)
def any_length(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompt, "WORTH", 0)


def test_it_serves_prompts_in_the_models_precision():
    assert all(served((name, {})) for name in ("none", "kivi", "sinkq", "turboquant", "fp8", "nf4"))
    for name in ("turbo", "int8", "int_flash"):  # which multiply codes
        assert not served((name, {})) and served((name, {"prefill_compute": "model"}))
    for settings in ({"softmax": "sas"}, {"prefill_compute": "int8"}):
        assert not served(("kivi", settings))
    x = torch.empty(1, 2, TOKENS, 64, device=DEVICE, dtype=DTYPE)
    spec = make_layer(("kivi", {})).spec
    for scores in (Scores(0.125, softcap=30.0), Scores(0.125, window=64), Scores(0.125, sinks=torch.zeros(2))):
        assert not by_sdpa(step_of(x, spec, scores))
    assert not by_sdpa(step_of(x, make_layer(("kivi", {}), "reference").spec, SCORES))


SERVED = [pytest.param(case, marks=pytest.mark.slow if case[1] else ()) for case in cases() if served(case)]


@pytest.mark.parametrize("case", SERVED, ids=case_id)
def test_the_cache_is_that_of_kernels_and_the_output_right(case: Case):
    x = inputs(1, TOKENS)
    through_sdpa, through_kernels = (make_layer(case) for _ in range(2))
    out, other = attend(through_sdpa, x, True), attend(through_kernels, x, False)
    assert (through_sdpa.prompt_by, through_kernels.prompt_by) == ("sdpa", "triton")
    assert not differing(through_sdpa, through_kernels)
    full = attention_fp64(*(t.cpu() for t in x)).to(DEVICE)
    own, kernels = ((t.double() - full).norm() / full.norm() for t in (out, other))
    assert own < 1.2 * kernels + 1e-6  # either rounds as its dtype does; 1e-6: sums in fp32 in another order
    step = inputs(1, 3, seed=1)  # both go on alike
    torch.testing.assert_close(attend(through_sdpa, step, True), attend(through_kernels, step, True), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        (("kivi", {}), math.nan),
        (("turbo", {"prefill_compute": "model", "rotate_k": "hadamard", "rotate_v": "hadamard"}), math.nan),
        (("sinkq", {"group_size": 32, "residual_length": 0, "sink_skip_layers": 0, "rotate_k": "hadamard"}), math.nan),
        pytest.param(("turboquant", {}), math.inf, marks=pytest.mark.slow),
    ],
    ids=["kivi-nan", "turbo-nan", "sinkq-nan", "turboquant-inf"],
)
def test_a_token_that_is_not_finite_stays_masked(case: Case, wrong: float):
    q, k, v = inputs(1, TOKENS)
    k[0, 1, 30, 4], v[0, 0, 50, 7], q[0, 3, 60, 1] = wrong, wrong, math.nan
    layers = [make_layer(case) for _ in range(2)]
    out, other = (attend(layer, (q, k, v), unpadded) for layer, unpadded in zip(layers, (True, False), strict=True))
    torch.testing.assert_close(out, other, atol=0, rtol=0, equal_nan=True)
    assert out[0, 3, 60].isnan().all() and int(out.isnan().any(-1).sum()) == 1
    assert not differing(*layers)


@pytest.mark.slow
def test_a_later_prompt_reads_the_cache():
    layer = make_layer(("kivi", {}))
    first = inputs(1, TOKENS)
    attend(layer, first, True)
    attend(layer, inputs(1, TOKENS), True)
    assert layer.prompt_by == "triton"
    layer.reset()
    attend(layer, first, True)
    assert layer.prompt_by == "sdpa"


@pytest.mark.parametrize("padding", [0, 3])
def test_through_a_model_a_padded_prompt_is_the_kernels(padding: int):
    model = qattn_hf.patch(tiny_llama(head_dim=64).to(DEVICE, DTYPE), method="kivi", impl="triton")
    ids, mask = random_ids(1, 40).to(DEVICE), torch.ones(1, 40, dtype=torch.long, device=DEVICE)
    mask[0, :padding] = 0
    model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
    prompts = {row["prompt"] for row in qattn_hf.report(model).to_dict()["layers"]}
    assert prompts == {"triton" if padding else "sdpa"}
