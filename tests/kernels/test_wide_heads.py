"""Heads of 512 channels, as in Gemma 4's full attention."""

from __future__ import annotations

import pytest
import torch
from helpers import DEVICE, Case, case_id, make_layer
from kernel_cases import BY_CHANNELS, CASES, INT8, KIVI, NONE, TURBO
from test_fused_kernels import (
    ON_GPU,
    ROUNDING,
    check_errors,
    check_prompt_and_step,
    error,
    exact,
    feed,
    inputs,
)

from qattn_kernels.layer.support import unsupported
from qattn_kernels.step.kernels import fused_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
DIM = 512
FEW = (TURBO, INT8, NONE, KIVI, ("fp8", {}), *BY_CHANNELS)  # the interpreter takes five seconds for a case


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES if ON_GPU else FEW, ids=case_id)
def test_state_and_outputs(case: Case):
    check_prompt_and_step(case, DIM, 8)


WIDE_CASES = [
    *(TURBO, INT8, ("fp8", {}), ("turbo", {"rotate_k": "hadamard"})),
    ("kivi", {"bits": 2, "group_size": 64, "residual_length": 0}),
]


@pytest.mark.slow
@pytest.mark.parametrize("group", [2, 8])  # one program for the queries of a head, and two
@pytest.mark.parametrize("case", WIDE_CASES, ids=case_id)
def test_error_against_fp64(case: Case, group: int):
    check_errors(case, "normal", 32768 if ON_GPU else 129, DIM, group)


def test_sums_of_codes_are_not_cut_off():
    """512 products of the largest codes are more than the low bits of a float hold (`MOST_SUMMED`)."""
    _, _, v = inputs(1, 66, heads=1, dim=DIM)
    k = torch.ones_like(v) * torch.where(torch.arange(66, device=DEVICE) % 2 == 0, 1.0, -1.0)[:, None]
    q = torch.full_like(v, 0.1)
    layer = make_layer(INT8, 128, 1)
    if reason := unsupported(layer.spec, 1, DIM, DIM):  # `QATTN_SHARED_KIB` limits the memory
        pytest.skip(reason)
    cuts = [65, 66]
    out = feed(fused_step, layer, (q, k, v), cuts)
    for x, n in zip(out, cuts, strict=True):
        assert error(x[:, :, -1:], exact(q[:, :, :1], k[:, :, :n], v[:, :, :n])) < ROUNDING
