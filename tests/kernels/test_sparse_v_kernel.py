"""Sparse V in the decode kernels: what is skipped is small, bounded and counted.

Without a GPU in Triton's interpreter. Pasts are written by the reference, whose state is the kernels' bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import DEVICE, Case, case_id, make_layer, random_ids, tiny_llama
from test_fused_kernels import Inputs, inputs, step

from qattn_hf import patch, report
from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.layer.skip_counts import skip_counts_of
from qattn_kernels.ops.decode import launch
from qattn_kernels.ops.decode.table import Launch
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.reference import reference_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
TAU, BUDGET = 1e-4, 1e-4
RUNS = [reference_step, fused_step]
FORMATS: list[Case] = [
    ("kivi", {"bits": 2, "group_size": 64, "residual_length": 0}),
    ("turbo", {"sink_num": 0}),
    ("turbo", {"bits": "mixed", "sink_num": 2, "sink_window": 0}),
    ("int8", {}),
    ("fp8", {}),
    ("none", {}),
    ("int_flash", {}),
]


def share(monkeypatch: pytest.MonkeyPatch, **shares: int) -> None:
    """Let programs share a context by these `table.Shares`."""
    choose = launch.choose

    def chosen(*args) -> Launch:
        found = choose(*args)
        return found._replace(shares=found.shares._replace(**shares))

    monkeypatch.setattr(launch, "choose", chosen)


@pytest.fixture
def one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program reads all packed blocks, so that a few blocks behave like a long context."""
    share(monkeypatch, few=1, many=1, long=10**6, least=64)


def with_sink(height: float, tokens: int, rows: int = 1, group: int = 2) -> Inputs:
    """Token 0 has a score `height` above the others', whose values have a mean that it lacks."""
    q, k, v = inputs(rows, tokens, heads=2, group=group)
    k[..., 3], q[..., 3] = 8.0, -height  # of a head dim of 64: a score of -height
    k[:, :, 0], v = 0.1 * k[:, :, 0], v + 1.0
    k[:, :, 0, 3] = 0.0
    v[:, :, 0] *= 0.05
    return q, k, v


def decoded(
    case: Case, qkv: Inputs, past: int, run: Any = fused_step, padding: int = 0, **sparsity: float
) -> tuple[torch.Tensor, QAttnLayer]:
    """Outputs of one short call of the tokens after `past`."""
    layer = make_layer((case[0], {**case[1], **{f"sparse_v_{key}": x for key, x in sparsity.items()}}), 320)
    step(reference_step, layer, qkv, 0, past)
    return step(run, layer, qkv, past, qkv[0].shape[2], padding)[0], layer


@pytest.mark.parametrize("case", FORMATS, ids=case_id)
def test_without_a_threshold_nothing_changes(case: Case):
    """Off, whatever the budget, and below every weight."""
    qkv = inputs(1, 131, group=2, kind="peaked")
    plain, layer = decoded(case, qkv, 130)
    assert not [name for name in layer.state if name.startswith("v_")]
    assert torch.equal(decoded(case, qkv, 130, budget=math.inf)[0], plain)
    looking, layer = decoded(case, qkv, 130, tau=1e-30)
    torch.testing.assert_close(looking, plain, rtol=0, atol=0 if DEVICE == "cpu" else 1e-5)  # compiled anew: fp32 sums
    skip_counts = skip_counts_of(layer.state)
    assert not skip_counts.skipped.any() and not skip_counts.dropped.any()
    assert torch.equal(
        skip_counts.read, skip_counts_of(decoded(case, qkv, 130, reference_step, tau=1e-30)[1].state).read
    )
    assert torch.equal(skip_counts.queries, torch.full_like(skip_counts.queries, 2))


HEIGHTS = [(14.0, 1), (18.0, 1), (18.0, 2)]
SKIPPED = [(case, *height) for case in FORMATS for height in HEIGHTS]
if DEVICE == "cpu":  # one of the heights for each format, all of them for the simplest
    SKIPPED = [(case, *HEIGHTS[i % 3]) for i, case in enumerate(FORMATS)] + [
        (FORMATS[-2], *height) for height in HEIGHTS[:2]
    ]


@pytest.mark.product("int8-14.0-1")
@pytest.mark.parametrize(
    ("case", "height", "programs"), SKIPPED, ids=lambda x: case_id(x) if isinstance(x, tuple) else str(x)
)
def test_an_output_moves_by_the_budget_at_most(
    case: Case, height: float, programs: int, request: pytest.FixtureRequest
):
    """Next to a sink, every other weight is below the threshold.

    At 14, a block of them weighs 0.9e-4, so the budget allows skipping one of three. At 18, all of them weigh 5e-6 and
    are skipped, even by a program that does not read the sink. Codes dequantize to at most 123/119 of the largest
    value, INT8 pairs of weights are off by 1e-4 of the weights, and fp32 sums by 1e-6.
    """
    if programs == 1:
        request.getfixturevalue("one_program")
    qkv = with_sink(height, 257)
    plain, _ = decoded(case, qkv, 256)
    largest = qkv[2].abs().max().item() * 123 / 119 * (1 + 1e-4)
    for budget in (BUDGET, math.inf):
        out, layer = decoded(case, qkv, 256, tau=TAU, budget=budget)
        skip_counts, moved = (
            skip_counts_of(layer.state),
            (out - plain).abs().amax((0, 2, 3)).unflatten(0, (2, 2)).amax(1),
        )
        assert (skip_counts.skipped >= (1 if height == 14.0 else 3) * 64 * 2).all()
        assert (moved <= skip_counts.worst[0] * largest + 1e-6).all()
        assert (skip_counts.worst <= budget).all()
        assert (skip_counts.worst * 2 >= skip_counts.dropped).all()  # two queries a head
        if budget == math.inf and height == 14.0:
            assert (moved > BUDGET).all(), "without a budget the same threshold drops more"


def test_programs_share_the_budget(monkeypatch: pytest.MonkeyPatch):
    """Of three two read two blocks each, and each could drop one or both, which weigh nearly the budget."""
    share(monkeypatch, least=2)
    budget, qkv = 1.2 * BUDGET, with_sink(14.0, 257)
    _, layer = decoded(("none", {}), qkv, 256, tau=TAU, budget=budget)
    assert (skip_counts_of(layer.state).worst <= budget).all()
    _, layer = decoded(("none", {}), qkv, 256, tau=TAU, budget=4 * budget)
    assert (skip_counts_of(layer.state).worst > budget).all(), "nothing but the budget keeps them from it"


def weights_of(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """fp64 softmax weights `[B, Hq, T, S]` of the last queries."""
    tokens, total = q.shape[2], k.shape[2]
    s = (q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT) * q.shape[3] ** -0.5
    mask = torch.ones(tokens, total, device=q.device).tril(total - tokens).bool()
    return s.masked_fill(~mask, -torch.inf).softmax(-1)


@pytest.mark.product("1-0.0002-inf-1")
@pytest.mark.parametrize(
    ("tokens", "tau", "budget", "blocks"),
    [(1, 1e-3, math.inf, 2), (1, 2e-4, math.inf, 1), (1, 1e-3, 2e-4, 1), (3, 1e-3, math.inf, 1), (3, 1e-3, 2e-4, 1)],
)
def test_only_weights_below_the_threshold_are_skipped(
    tokens: int, tau: float, budget: float, blocks: int, one_program: None
):
    """Each value has a separate channel, so outputs are the weights, and skipped weights are zeros.

    The third of four blocks weighs 2e-3 in total and at most 3e-4 per weight, so neither a threshold of 2e-4 nor the
    budget allows skipping it. The first of three queries is half as peaked and needs that block. The fourth block
    weighs less than the budget for all queries.
    """
    past = 256
    q, k, v = inputs(1, past + tokens, heads=2, group=2, dim=past)
    k[..., :past, 3] = torch.tensor([0.0, -2.0, -6.0, -18.0], device=DEVICE).repeat_interleave(64)
    q[..., 3] = 16.0  # times the scale of 1/16
    if tokens > 1:
        q[:, :, past, 3] = 8.0
    v[:, :, :past], v[:, :, past:] = torch.eye(past, device=DEVICE), 0.0
    out, layer = decoded(("none", {}), (q, k, v), past, tau=tau, budget=budget)
    want = weights_of(q[:, :, past:], k)[..., :past]
    skipped = out == 0
    torch.testing.assert_close(out.double(), want * ~skipped, rtol=1e-4, atol=1e-12)
    assert want[skipped].max() < tau
    skip_counts = skip_counts_of(layer.state)
    assert (skip_counts.skipped == blocks * 64 * 2 * tokens).all()
    seen = past * tokens + tokens * (tokens + 1) // 2
    assert torch.equal(skip_counts.read, torch.full_like(skip_counts.read, 2 * seen))
    by_head = skipped.unflatten(1, (2, 2)), (want * skipped).sum(-1).unflatten(1, (2, 2))
    assert torch.equal(skip_counts.skipped, by_head[0].sum((2, 3, 4)))
    torch.testing.assert_close(skip_counts.dropped, by_head[1].sum((2, 3)), rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(skip_counts.worst.double(), by_head[1].amax((2, 3)), rtol=1e-4, atol=1e-9)
    assert (skip_counts.worst <= budget).all() and torch.equal(
        skip_counts.queries, torch.full_like(skip_counts.queries, 2 * tokens)
    )


@pytest.mark.parametrize("run", RUNS, ids=["reference", "kernels"])
@pytest.mark.parametrize("case", [FORMATS[0], FORMATS[3]], ids=case_id)
def test_columns_without_a_query_do_not_hinder(case: Case, run: Any, one_program: None):
    """Row 0 has one real token among three columns, row 1 has three; each skips as it does alone."""
    qkv = with_sink(18.0, 259, rows=2)
    out, layer = decoded(case, qkv, 256, run, padding=2, tau=TAU)
    first = [torch.cat([x[:1, :, :256], x[:1, :, 258:]], 2) for x in qkv]
    for row, alone in enumerate((first, [x[1:] for x in qkv])):
        want, other = decoded(case, (alone[0], alone[1], alone[2]), 256, run, tau=TAU)
        torch.testing.assert_close(out[row : row + 1, :, -want.shape[2] :], want, rtol=0, atol=1e-5)
        for got, expected in zip(skip_counts_of(layer.state), skip_counts_of(other.state), strict=True):
            torch.testing.assert_close(got[row : row + 1], expected)
        assert (skip_counts_of(other.state).skipped > 0).all()


@pytest.mark.parametrize("run", RUNS, ids=["reference", "kernels"])
def test_the_worst_query_is_remembered(run: Any, one_program: None):
    """The second weighs all tokens alike, 1 / 258 each, and skips none."""
    q, k, v = with_sink(18.0, 258)
    q[:, :, 257] = 0.0
    _, layer = decoded(("none", {}), (q[:, :, :257], k[:, :, :257], v[:, :, :257]), 256, run, tau=TAU)
    first = [x.clone() for x in skip_counts_of(layer.state)]
    step(run, layer, (q, k, v), 257, 258)
    read, skipped, queries, dropped, worst = skip_counts_of(layer.state)
    assert (worst > 0).all() and torch.equal(worst, first[4]) and torch.equal(dropped, first[3])
    assert torch.equal(skipped, first[1]) and torch.equal(read, first[0] + 2 * 258)
    assert torch.equal(queries, first[2] + 2)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_the_report_says_what_was_skipped(impl: str):
    model = tiny_llama(hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64).to(DEVICE)
    ids = random_ids(1, 70).to(DEVICE)
    patch(model, "int8", impl=impl)
    model.generate(ids, do_sample=False, max_new_tokens=3)
    assert report(model).to_dict()["skip_rate"] is None
    assert "skipped" not in str(report(model))
    patch(model, "int8", impl=impl, sparse_v_tau=0.1, sparse_v_budget=0.7)
    model.generate(ids, do_sample=False, max_new_tokens=3)
    data = report(model).to_dict()
    assert {row["kernels"] for row in data["layers"]} == {impl}
    for found in (data, *data["layers"]):
        assert 0 < found["skip_rate"] < 1
        assert 0 < found["dropped_mass"] <= found["dropped_worst"] <= 0.7
    assert f"{data['skip_rate']:.1%} of values skipped" in str(report(model))
