"""Loads that a step issues before it knows its row's lengths: its token, its query, sinks, and parts to merge."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import DEVICE, Case, case_id, error, make_layer
from kernel_cases import INT8, KIVI, NONE, TURBO
from test_fused_kernels import differing, feed, inputs

from qattn_kernels.layer.scores import Scores
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.reference import reference_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]


ROTATED: Case = ("turbo", {"rotate_k": "hadamard", "rotate_v": "hadamard"})  # by the program that has the token


@pytest.mark.parametrize("case", [TURBO, INT8, NONE, KIVI, ROTATED], ids=case_id)
def test_a_row_without_a_token_leaves_nothing_of_its_column(case: Case):
    """Padding that is not finite, in the one column of a step: nothing is stored, counted or masked."""
    qkv = inputs(2, 71)
    qkv[1][0, :, 70], qkv[2][0, :, 70], qkv[0][0, :, 70] = math.nan, math.inf, math.nan
    span = torch.tensor([[0, 0], [0, 1]], dtype=torch.int32, device=DEVICE)
    one, other = make_layer(case, 128), make_layer(case, 128)
    outputs = []
    for run, layer in ((reference_step, one), (fused_step, other)):
        feed(run, layer, qkv, [70])
        q, k, v = (x[:, :, 70:] for x in qkv)
        past = () if run is reference_step else (2,)
        outputs.append(run(q, k, v, span, layer.state, layer.spec, Scores(q.shape[-1] ** -0.5), *past)[0])
    assert differing(one, other) == []
    assert outputs[1][0].eq(0).all() and error(outputs[1], outputs[0]) < 0.04  # as codes cost: test_fused_kernels.py


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [13, 15, 17])
def test_as_many_parts_as_a_merge_reads_early_and_one_more(blocks: int):
    """Two blocks per part and the ring give 8, 9 and 10 parts. The oldest and the newest token matter most."""
    tokens = 64 * blocks + 5
    q, k, v = inputs(1, tokens + 1, heads=1)
    for place in (3, 64 * blocks - 3):
        k[:, :, place] = 3 * q[:, :, -1]
    want = feed(reference_step, make_layer(TURBO, 64 * 20, 1), (q, k, v), [tokens, tokens + 1])[1]
    got = feed(fused_step, make_layer(TURBO, 64 * 20, 1), (q, k, v), [tokens, tokens + 1])[1]
    assert error(got, want) < 0.04


def test_the_only_sink_is_read():
    """The first entry of the table, which draws most of the attention."""
    case: Case = ("sinkq", {"group_size": 64, "residual_length": 0, "sink_num": 1, "sink_window": 0})
    q, k, v = inputs(1, 66)
    k[..., 5] += 6
    q[..., 5] = -6.0
    k[:, :, 0] *= 0.05
    want = feed(reference_step, make_layer(case, 128), (q, k, v), [63, 64, 66])[2]
    got = feed(fused_step, make_layer(case, 128), (q, k, v), [63, 64, 66])[2]
    assert error(got, want) < 1e-3  # queries in fp16: test_fused_kernels.py
    assert want.norm() < 1.2 * v[:, :, 0].norm() * math.sqrt(2)  # it does draw it
