"""Non-finite queries in kernels: their output is NaN, and other outputs are the same as with a query of zeros."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import DEVICE, Case, case_id, make_layer
from kernel_cases import CASES, MORE_CASES
from test_fused_kernels import feed, inputs

from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.reference import reference_step
from qattn_kernels.step.stock_cache import attend_over

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
ON_GPU = DEVICE == "cuda"
# the interpreter is slow: there one case of each method
SOME = CASES + MORE_CASES if ON_GPU else list({case[0]: case for case in reversed(CASES)}.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "wrong"),
    [(case, math.nan) for case in SOME] + [(case, math.inf) for case in (SOME if ON_GPU else SOME[:2])],
    ids=lambda x: str(x) if isinstance(x, float) else case_id(x),
)
def test_a_query_that_is_not_finite_spoils_its_own_output_alone(case: Case, wrong: float):
    q, k, v = inputs(1, 80, group=2)
    broken, zeros = q.clone(), q.clone()
    for token in (20, 73, 76):
        broken[0, 1, token, 3], zeros[0, 1, token] = wrong, 0
    cuts, outs = [70, 74, 80], []
    for x, run in ((broken, fused_step), (zeros, fused_step), (broken, reference_step)):
        layer = make_layer(case, 256)
        out = torch.cat(feed(run, layer, (x, k, v), cuts), 2)
        outs.append((out, {name: tensor.clone() for name, tensor in layer.state.items()}))
    (got, state), (want, other), (reference, _) = outs
    want[0, 1, [20, 73, 76]] = math.nan
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isnan(), reference.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert all(torch.equal(tensor, other[name]) for name, tensor in state.items())


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("smooth", [True, False])
def test_over_a_stock_cache_no_token_spoils_another(impl: str, smooth: bool):
    """A key or value that is not finite is masked; a query has its own output alone."""
    from qattn_hf.methods import get_method

    settings = {"cache": "model", "bits": 4} if smooth else {"cache": "model", "smooth_k": False}
    spec = get_method("sage2")(**settings).last_layer_spec(2)
    spec = LayerSpec(**{**vars(spec), "impl": impl})
    q, k, v = inputs(1, 90, group=2)
    mask, clean = torch.ones(1, 90, dtype=torch.bool, device=DEVICE), torch.ones(1, 90, dtype=torch.bool, device=DEVICE)
    clean[0, [30, 50]] = False
    broken = [x.clone() for x in (q, k, v)]
    broken[1][0, 1, 30, 4], broken[2][0, 0, 50, 7], broken[0][0, 3, 60, 1] = math.nan, math.inf, math.nan
    zeros = q.clone()
    zeros[0, 3, 60] = 0
    got, _ = attend_over(*broken, mask, 0, spec, Scores(0.125))
    want, _ = attend_over(zeros, k, v, clean, 0, spec, Scores(0.125))
    assert got[0, 3, 60].isnan().all()
    real = torch.ones(90, dtype=torch.bool, device=DEVICE)
    real[[30, 50, 60]] = False  # outputs of padding in a stock cache are not read
    torch.testing.assert_close(got[:, :, real], want[:, :, real], atol=0, rtol=0)
