"""Where SAS cuts: blocks in order, each relative to the largest score so far, with exact merges.

TurboAttention, section 4 and Algorithm 1. The project does not use SAS to rescale earlier blocks: SAS(0) is below 1, so
each later block would fade them, and blocks more than 6 below a later maximum would vanish.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import DEVICE, Case, case_id, make_layer
from test_fused_kernels import Inputs, step
from test_sparse_v_kernel import one_program as one_program

from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.reference import reference_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
BLOCK, DIM = 64, 64
CASES: list[Case] = [
    ("none", {"softmax": "sas"}),
    ("turbo", {"softmax": "sas", "sink_num": 0}),
    ("int8", {"softmax": "sas"}),
]
# of one query over four blocks, which kernels take two at a time, and a last token that has no weight
FALLING = torch.cat([torch.zeros(1), torch.full((127,), -20.0), torch.full((128,), -6.6), torch.tensor([-20.0])])
RISING = torch.cat([torch.zeros(128), torch.tensor([6.5]), torch.full((127,), -3.0), torch.tensor([-20.0])])


def scored(scores: torch.Tensor) -> Inputs:
    """Every query has these scores, at a scale of 1/8; the values of the first two blocks are 1, the others 20."""
    q, k, v = (torch.zeros(1, 1, len(scores), DIM) for _ in "qkv")
    q[..., 0], k[..., 0], v[...] = 8.0, scores, 20.0
    v[:, :, : 2 * BLOCK] = 1.0
    return q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)


def weighed(scores: torch.Tensor, cut: float = -6.0) -> float:
    """Return the output of the last query.

    Weights below the cut, relative to the largest score up to its own block, are 0, and the others are exponentials.
    """
    highest = torch.stack([scores[: start + BLOCK].max() for start in range(0, len(scores), BLOCK)])
    highest = highest.repeat_interleave(BLOCK)[: len(scores)]
    kept = torch.where(scores - highest >= cut, scores.double().exp(), 0.0)
    return float((kept * scored(scores)[2].cpu()[0, 0, :, 0]).sum() / kept.sum())


@pytest.mark.parametrize("call", ["decode", "prefill"])
@pytest.mark.parametrize("run", [reference_step, fused_step], ids=["reference", "kernels"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
@pytest.mark.parametrize("scores", [FALLING, RISING], ids=["lower blocks are cut", "earlier ones are not"])
def test_the_cut(scores: torch.Tensor, case: Case, run: Any, call: str, one_program: None):
    """SAS is off by 0.1 %.

    Four bits for scores from -3 to 6.5 are off by a quarter of a step, 0.16, so weights are off by less than 20 % and
    values by 0.02.
    """
    qkv, want = scored(scores), weighed(scores)
    wrong = weighed(scores, -1e9) if scores is FALLING else 20.0  # nothing cut, nothing left of the first blocks
    layer, last = make_layer(case, 320, 1), len(scores) - 1
    if call == "decode":
        step(reference_step, layer, qkv, 0, last)
    out = step(run, layer, qkv, last if call == "decode" else 0, last + 1)[0]
    share = (20 - want) / 19  # of the blocks whose values are 1
    limit = 2e-3 * want if case[0] == "none" else 0.05 + 0.2 * 19 * share * (1 - share)
    assert limit < abs(want - wrong) / 3
    assert out[0, 0, -1, 0].item() == pytest.approx(want, abs=limit)
