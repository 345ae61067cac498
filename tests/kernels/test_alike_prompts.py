"""Prompts without padding against the general prefill: output and log-sum-exp of `prefill.reference._attend_alike`."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import Case, case_id, feed, make_layer, random_qkv, same_state
from kernel_cases import CASES, KIVI, MORE_CASES, SCORES, TURBO

from qattn_kernels.layer.scores import Scores
from qattn_kernels.ops.prefill import reference
from qattn_kernels.reference.attention import attend
from qattn_kernels.step.reference import reference_step

ORDER_OF_SUMS = 1e-5  # relative: fp32 sums of some hundred terms, in another order


@pytest.fixture
def general_calls(monkeypatch) -> list[int]:
    """One entry for each chunk of queries that `attend` computes."""
    calls: list[int] = []

    def counted(q, *others, **more):
        calls.append(q.exact.shape[2])
        return attend(q, *others, **more)

    monkeypatch.setattr(reference, "attend", counted)
    return calls


def prompts(case: Case, monkeypatch, scores: Scores = SCORES["plain"], broken: int | None = None) -> list[torch.Tensor]:
    """Read 170 tokens, then 100 more, with and without `_attend_alike`.

    Returns output and log-sum-exp of both calls with it, then without it. `broken`: a key that is not finite."""
    qkv = random_qkv(2, 270)
    if broken is not None:
        qkv[1][1, :, broken, 1] = math.nan
    layers, results = [make_layer(case, 384), make_layer(case, 384)], []
    for layer in layers:
        layer.lazy_initialization(*(x[:, :, :1] for x in qkv[1:]))
        for start, end in ((0, 170), (170, 270)):
            span = torch.tensor([[0, end - start]] * 2, dtype=torch.int32)
            q, k, v = (x[:, :, start:end] for x in qkv)
            results += reference_step(q, k, v, span, layer.state, layer.spec, scores)
        monkeypatch.setattr(reference, "_alike", lambda *call: False)
    assert same_state(*layers) == []
    return results


def assert_same(results: list[torch.Tensor]) -> None:
    for fast, general in zip(results[:4], results[4:], strict=True):
        torch.testing.assert_close(fast, general, rtol=ORDER_OF_SUMS, atol=ORDER_OF_SUMS)


@pytest.mark.parametrize("case", [*CASES, *MORE_CASES], ids=case_id)
def test_every_format(case: Case, monkeypatch):
    assert_same(prompts(case, monkeypatch))


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("case", [("int8", {}), ("none", {}), KIVI, TURBO], ids=case_id)
def test_every_kind_of_scores(case: Case, scores: Scores, monkeypatch, general_calls: list[int]):
    assert_same(prompts(case, monkeypatch, scores))
    assert len(general_calls) == 3 + 2, "the general prefill alone computes chunks of 64 queries by `attend`"


@pytest.mark.parametrize("case", [("int8", {}), TURBO], ids=case_id)
def test_a_query_without_a_visible_token(case: Case, monkeypatch, general_calls: list[int]):
    """The first key is masked, so that the first query sees nothing: `attend` computes its chunk."""
    results = prompts(case, monkeypatch, broken=0)
    assert_same(results)
    assert results[1][1, :, 0].isneginf().all()
    assert len(general_calls) == 1 + 3 + 2


def test_padding_takes_the_general_prefill(general_calls: list[int]):
    layer = make_layer(("int8", {}), 384)
    feed(layer, *random_qkv(2, 100), [100], first=3)
    assert general_calls
