"""A program of the merge takes several queries of many rows, and few channels of few rows. The results are equal."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from helpers import DEVICE, Case, make_layer
from kernel_cases import INT8, NONE

from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.chip import H200, as_chip
from qattn_kernels.layer.scores import Scores
from qattn_kernels.ops.decode import launch
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.reference import reference_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
SMALL = H200._replace(multiprocessors=1)  # the rows of a test fill it, so a context gets few splits
SETTINGS: list[Case] = [
    INT8,
    ("kivi", {"bits": 4, "group_size": 64, "residual_length": 128}),  # several programs read the ring
    ("turbo", {"sink_num": 2}),
    ("fp8", {}),  # no program reads open tokens
    ("turboquant", {"rotate": "hadamard", "sparse_v_tau": 0.01}),
]
SHAPES = [  # several queries, one query, few channels
    launch.Merging(4, 4, 4, 64, 1),
    launch.Merging(8, 16, 1, 64, 1),
    launch.Merging(2, 4, 1, 32, 2),
]
CUTS = [1, 63, 64, 66]
SHARES = {"v_dropped", "v_worst"}  # counters of sparse V that are fractions
Outputs = list[tuple[torch.Tensor, torch.Tensor]]


def spans(end: int, tokens: int) -> torch.Tensor:
    """Row 0 has tokens from the second call on, row 1 never, the others always."""
    return torch.tensor([[0, tokens * (end > 1)], [0, 0], [0, tokens], [0, tokens]], dtype=torch.int32, device=DEVICE)


def run_steps(run, case: Case, sinks: bool = False) -> tuple[QAttnLayer, Outputs]:
    """The layer, and outputs and log-sum-exps of calls that end at `CUTS`."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, h, CUTS[-1], 64, generator=g).to(DEVICE) for h in (6, 2, 2))
    layer, found = make_layer(case, 256), []
    layer.lazy_initialization(k, v)
    scores = Scores(0.125, sinks=torch.arange(-3.0, 3.0, device=DEVICE) if sinks else None)
    past = (layer.capacity // layer.spec.window.block,) if run is fused_step else ()
    for start, end in pairwise([0, *CUTS]):
        new = (x[:, :, start:end].contiguous() for x in (q, k, v))
        found.append(run(*new, spans(end, end - start), layer.state, layer.spec, scores, *past))
    return layer, found


@pytest.mark.slow
@pytest.mark.parametrize(("case", "sinks"), [(NONE, True), *((case, False) for case in SETTINGS)], ids=str)
def test_programs_of_any_shape_have_equal_results(case: Case, sinks: bool, monkeypatch: pytest.MonkeyPatch):
    """A prompt, a step that closes a block, rows without tokens, a call of two tokens, three query heads a KV head.

    With so few multiprocessors, one program reads the ring and the sinks."""
    _, want = run_steps(reference_step, case, sinks)
    shapes = SHAPES if "rotate" not in case[1] else SHAPES[:2]
    found = []
    for shape in shapes:
        monkeypatch.setattr(launch, "merging", lambda *_, shape=shape: shape)
        with as_chip(SMALL):
            found.append(run_steps(fused_step, case, sinks))
    layer, several = found[0]
    for other, one in found[1:]:
        assert all(torch.equal(layer.state[name], other.state[name]) for name in layer.state if name not in SHARES)
        for name in SHARES & set(layer.state):  # sums over queries, in any order
            torch.testing.assert_close(layer.state[name], other.state[name], rtol=1e-5, atol=1e-6)
        for (out, lse), (out2, lse2), (out3, _) in zip(several, one, want, strict=True):
            # only the order of sums differs, of at most ten numbers in fp32
            torch.testing.assert_close(out, out2, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(lse, lse2, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(out, out3, rtol=0.05, atol=0.05)  # a wrong or missing split is off by 1


@pytest.mark.slow
@pytest.mark.parametrize("case", [INT8, ("fp8", {})], ids=str)
def test_one_split_stores_what_its_merge_would(case: Case, monkeypatch: pytest.MonkeyPatch):
    """A program that reads a whole row stores the call's output itself, also for rows without tokens."""
    choose, merge = launch.choose, launch.merge
    merges, found = 0, []

    def one_split(*arguments) -> launch.Launch:
        chosen = choose(*arguments)
        return chosen._replace(shares=chosen.shares._replace(few=1, many=1))

    def counted(*arguments) -> None:
        nonlocal merges
        merges += 1
        merge(*arguments)

    monkeypatch.setattr(launch, "choose", one_split)
    monkeypatch.setattr(launch, "merge", counted)
    found.append(run_steps(fused_step, case))
    assert merges == 0
    monkeypatch.setattr(launch, "ends_alone", lambda *_: False)
    found.append(run_steps(fused_step, case))
    assert merges == len(CUTS) - 1  # the call of 62 tokens is no decode
    (layer, alone), (other, several) = found
    assert all(torch.equal(layer.state[name], other.state[name]) for name in layer.state)
    for (out, lse), (out2, lse2) in zip(alone, several, strict=True):
        # the same operations, but a compiler may fuse other multiplications and additions: some units in the last place
        torch.testing.assert_close(out, out2, rtol=1e-6, atol=0)
        torch.testing.assert_close(lse, lse2, rtol=1e-6, atol=1e-6)
