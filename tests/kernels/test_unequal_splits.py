"""The first splits of a long context are larger than the others. Results are as with equal splits."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICE, Case, make_layer
from kernel_cases import INT8

from qattn_kernels.launch.constants import WHOLE
from qattn_kernels.launch.plan import forget_plans
from qattn_kernels.layer.scores import Scores
from qattn_kernels.ops.decode import launch
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.reference import reference_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
LENGTHS = [700, 300, 65, 0]  # 10, 4, 1 and no closed blocks of 64; two of the rows are long enough for large splits
SETTINGS: list[Case] = [
    INT8,  # the split of the last block writes the token
    ("turbo", {"sink_num": 2, "bits": "mixed"}),
    ("sinkq", {"sink_num": 4}),  # a program learns from the table where the pool ends
    ("kivi", {"bits": 2, "group_size": 32, "residual_length": 32}),  # a program reads several blocks at once
    ("turboquant", {"sparse_v_tau": 0.01}),  # each split may skip its share
]
CUTS = [  # many, large, sixteenths of the context for each large split
    (4, 0, 0),
    (4, 2, 6),
    (5, 1, 12),
    (4, 3, 5),
]


def step(case: Case, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of a decode step of four rows, after a prompt of their `LENGTHS`."""
    g = torch.Generator().manual_seed(0)
    longest = max(LENGTHS)
    q, k, v = (torch.randn(4, h, longest + 1, 64, generator=g).to(DEVICE) for h in (6, 2, 2))
    layer = make_layer(case, 64 * blocks)
    layer.lazy_initialization(k, v)
    spans = torch.tensor([[longest - n, longest] for n in LENGTHS], dtype=torch.int32, device=DEVICE)
    reference_step(*(x[:, :, :-1].contiguous() for x in (q, k, v)), spans, layer.state, layer.spec, Scores(0.125))
    new = (x[:, :, -1:].contiguous() for x in (q, k, v))
    spans = torch.tensor([[0, 1]] * 4, dtype=torch.int32, device=DEVICE)
    return fused_step(*new, spans, layer.state, layer.spec, Scores(0.125), layer.capacity // layer.spec.window.block)


@pytest.mark.slow
@pytest.mark.parametrize("case", SETTINGS, ids=str)
def test_splits_of_any_size_have_equal_results(case: Case, monkeypatch: pytest.MonkeyPatch):
    found, choose = [], launch.choose
    for many, large, sixteenths in CUTS:

        def chosen(*sizes, many=many, large=large, part=sixteenths * WHOLE // 16):
            own = choose(*sizes)
            shares = own.shares._replace(few=2, many=many, long=2, least=1, large=large, part=part)
            return own._replace(shares=shares)

        monkeypatch.setattr(launch, "choose", chosen)
        forget_plans()
        out, lse = step(case, 12)
        larger = step(case, 40)
        assert torch.equal(out, larger[0]) and torch.equal(lse, larger[1])  # the capacity changes nothing
        found.append((out, lse))
    forget_plans()
    # Only the order of sums differs. INT8 weights are relative to the largest weight of a block, not of a split. Sparse
    # V at 0.01 may drop other tokens, which carry at most that part of the weights.
    out_tolerance = 0.05 if "sparse_v_tau" in case[1] else 1e-5
    for out, lse in found[1:]:
        torch.testing.assert_close(out, found[0][0], rtol=out_tolerance, atol=out_tolerance)
        torch.testing.assert_close(lse, found[0][1], rtol=1e-5, atol=1e-5)
