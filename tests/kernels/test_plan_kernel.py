"""Launch plans: later calls of the same shapes are launched from what one recorded, over other arenas too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import DEVICE, Case, case_id, make_layer
from kernel_cases import CASES, MORE_CASES

from qattn_hf.layer.handle import Handle
from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.launch import plan
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.step import Step
from qattn_kernels.step import kernels

pytestmark = pytest.mark.gpu
CALLS = (36, 1, 1, 3, 3, 36, 1)  # tokens of each call: prompts without and with a past, steps, drafts
# the interpreter is slow: there one case of some methods, with rings, sinks and rotations among them
FEW = {case[0]: case for case in reversed(CASES) if case[0] in ("turbo", "sinkq", "turboquant", "sage2", "none")}
SOME = CASES + MORE_CASES if DEVICE == "cuda" else list(FEW.values())


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_plans", {})


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each call whose launches were worked out, and not taken from a plan."""
    found: list[int] = []
    run = kernels.run_step

    def counted(step: Step) -> Any:
        found.append(step.query.shape[2])
        return run(step)

    monkeypatch.setattr(kernels, "run_step", counted)
    return found


def layer_of(case: Case) -> QAttnLayer:
    return QAttnLayer(replace(make_layer(case).spec, impl="triton"), 256)


def call(layer: QAttnLayer, tokens: int, seed: int, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Run one call of two rows. The first row has a column of padding."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, tokens, heads, 64, generator=g).to(DEVICE).transpose(1, 2) for heads in (4, 2, 2))
    span = torch.tensor([[tokens > 1, tokens - (tokens > 1)], [0, tokens]], dtype=torch.int32, device=DEVICE)
    if not layer.is_initialized:
        layer.lazy_initialization(k, v)
    return layer.attend(q, Handle(layer, k, v), span, Scores(0.125, sinks=sinks))[0]


@pytest.mark.parametrize("case", SOME, ids=case_id)
def test_a_plan_does_what_was_recorded(case: Case, computed: list[int], monkeypatch: pytest.MonkeyPatch):
    plain, first, second = layer_of(case), layer_of(case), layer_of(case)
    with monkeypatch.context() as unplanned:
        unplanned.setattr(
            "qattn_kernels.step.operator.planned", lambda key, inputs, compute, *arguments, arenas: compute(*arguments)
        )
        want = [call(plain, tokens, seed) for seed, tokens in enumerate(CALLS)]
    call(first, CALLS[0], 0)
    computed.clear()
    got = [call(second, tokens, seed) for seed, tokens in enumerate(CALLS)]
    smoothed = second.spec.compute.smooth_q != "none"  # PyTorch multiplies the mean queries of its prompts
    assert computed == [36, 1, 3, 36] if smoothed else [1, 3, 36]  # the later prompt sees packed blocks
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert torch.equal(plain.arena, second.arena)


@pytest.mark.slow
def test_what_differs_in_more_than_addresses_has_a_plan_of_its_own(computed: list[int]):
    layer = layer_of(("turbo", {}))
    call(layer, 1, 0)
    call(layer, 1, 1)
    assert len(computed) == 1
    call(layer, 1, 2, sinks=torch.zeros(4, device=DEVICE))
    layer.raise_horizon(128)
    call(layer, 1, 3)
    layer.batch_select_indices([0, 1])
    call(layer, 1, 4)
    assert len(computed) == 3  # the last one has another arena with the same shapes


def test_inputs_that_share_memory_are_never_planned(computed: list[int]):
    layer = layer_of(("int8", {}))
    k = torch.randn(1, 2, 1, 64, device=DEVICE)
    layer.lazy_initialization(k, k)
    span = torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        layer.attend(k, Handle(layer, k, k), span, Scores(0.125))
    assert len(computed) == 2


def test_a_call_that_does_more_than_launch_is_never_planned():
    x = torch.ones(4, device=DEVICE)
    plan.planned("doubled", (x,), lambda: [x * 2])
    assert plan.planned("doubled", (x,), lambda: [x * 3])[0].tolist() == [3.0] * 4
