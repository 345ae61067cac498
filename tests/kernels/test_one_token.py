"""The step of one token against the general step, bit for bit: state, output and log-sum-exp."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from helpers import Case, case_id, feed, make_layer, random_qkv, same_state
from kernel_cases import CASES, KIVI, MORE_CASES, SCORES, TURBO

from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.formats import Format
from qattn_kernels.formats.int8.reference import Int8Format
from qattn_kernels.layer.scores import Scores
from qattn_kernels.ops.crop.reference import crop
from qattn_kernels.ops.rotate.reference import rotate, rotate_back, rotated
from qattn_kernels.step import reference
from qattn_kernels.step.reference import general_step, reference_step

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def general_calls(monkeypatch) -> list[int]:
    """One entry for each call that the general step computes."""
    calls: list[int] = []

    def counted(q: torch.Tensor, *others) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(q.shape[2])
        return general_step(q, *others)

    monkeypatch.setattr(reference, "general_step", counted)
    return calls


def differing(layer: QAttnLayer, qkv: Inputs, start: int, end: int, scores: Scores = SCORES["plain"]) -> list[str]:
    """Feed the tokens `start` to `end` one by one to a layer and, by the general step, to its twin.

    Returns what differs after any step: names of state tensors, `out`, `lse`."""
    twin, found, rows = copy.deepcopy(layer), [], len(qkv[0])
    span = torch.tensor([[0, 1]] * rows, dtype=torch.int32)
    for t in range(start, end):
        q, k, v = (x[:, :, t : t + 1] for x in qkv)
        out, lse = reference_step(q, k, v, span, layer.state, layer.spec, scores)
        compute = twin.spec.compute
        turned = rotated(q, k, v, compute, twin.state, partial(map, rotate))
        want, want_lse = general_step(*turned, span, twin.state, twin.spec, scores)
        want = want if compute.rotate_v == "none" else rotate_back(want)
        found += same_state(layer, twin)
        found += [name for name, a, b in (("out", out, want), ("lse", lse, want_lse)) if not torch.equal(a, b)]
    return sorted(set(found))


@pytest.mark.parametrize("finite", [True, False], ids=["finite", "masked token"])
@pytest.mark.parametrize("case", [*CASES, *MORE_CASES], ids=case_id)
def test_every_format(case: Case, finite: bool, general_calls: list[int]):
    """Steps from the first token on, after a prompt, and across blocks that close; with a masked token in one block."""
    qkv = random_qkv(2, 300)
    if not finite:
        qkv[1][1, 0, 40, 1] = math.nan
    layer = make_layer(case, 384)
    layer.lazy_initialization(*(x[:, :, :1] for x in qkv[1:]))
    assert differing(layer, qkv, 0, 3) == []
    feed(layer, *(x[:, :, 3:] for x in qkv), [167])
    assert differing(layer, qkv, 170, 196) == []
    assert len(general_calls) <= 1 + 2, "at most the prompt and two steps that close a block"


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("case", [("int8", {}), ("none", {}), KIVI, ("turbo", {"sink_num": 0})], ids=case_id)
def test_every_kind_of_scores(case: Case, scores: Scores, general_calls: list[int]):
    qkv = random_qkv(2, 200)
    layer = make_layer(case, 256)
    feed(layer, *qkv, [130])
    general_calls.clear()
    assert differing(layer, qkv, 130, 150, scores) == []
    assert general_calls == []


@pytest.mark.parametrize("case", [("int8", {}), TURBO, KIVI], ids=case_id)
def test_after_a_crop(case: Case, general_calls: list[int]):
    """The general step grows a row back to what it was, because removed tokens still follow its end."""
    qkv, other = random_qkv(1, 200), random_qkv(1, 200, seed=1)
    layer = make_layer(case, 256)
    feed(layer, *qkv, [140, 150])
    crop(layer.state, layer.spec, 5)
    general_calls.clear()
    assert differing(layer, other, 145, 155) == []
    assert general_calls == [1] * 5


def test_a_subclass_that_overrides_an_operation_loses_its_shortcut():
    """The short step would otherwise store or read tokens as the parent does."""

    class Writes(Int8Format):
        def write(self, state: Any, block: Any) -> None:
            super().write(state, block)

    class Quantizes(Int8Format):
        def quantize_tokens(self, new: Any, state: Any) -> Any:
            return super().quantize_tokens(new, state)

    pairs = [("put", "write"), ("token_levels", "quantize_tokens")]
    kept = {cls.__name__: [cls().keeps(*pair) for pair in pairs] for cls in (Format, Int8Format, Writes, Quantizes)}
    assert kept == {
        "Format": [False, False],
        "Int8Format": [True, True],
        "Writes": [False, True],
        "Quantizes": [True, False],
    }
