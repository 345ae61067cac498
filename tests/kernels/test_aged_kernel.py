"""Blocks of 8 bits, and rows whose first blocks have fewer: kernels against the reference, codes bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import DEVICE, error, make_layer
from test_fused_kernels import ROUNDING, Inputs, differing, feed, inputs

from qattn_hf.layer import changes
from qattn_hf.layer.budget_layer import BudgetLayer
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.layer.memory_budget import BudgetLayerSpec, at_stage
from qattn_hf.methods import get_method
from qattn_kernels.layer.support import unsupported
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.reference import reference_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU: too large for the interpreter")
STAGES = [(0, 0), (0, 2), (1, 1), (2, 2), (3, 2), (4, 0)]  # K8V8, V8/4, K8/4, V4/2, K4/2, K2V2


def layer_at(stage: int, aged: int, blocks: int = 6, **pieces) -> QAttnLayer:
    spec = get_method("turbo")(bits=2, memory=10**9, **pieces).last_layer_spec(2)
    assert isinstance(spec, BudgetLayerSpec)
    return QAttnLayer(at_stage(spec, stage, aged), blocks * spec.window.block)


def check(stage: int, aged: int, qkv: Inputs, cuts: list[int], blocks: int = 6, **pieces) -> None:
    """State bit for bit and outputs of prompt and steps, over the widths of a stage; row 0 has padding."""
    fused, reference = (layer_at(stage, aged, blocks, **pieces) for _ in range(2))
    heads = qkv[1].shape[1]
    assert unsupported(fused.spec, heads, qkv[1].shape[3], qkv[2].shape[3]) is None
    outs = [feed(run, one, qkv, cuts, first=5) for run, one in ((fused_step, fused), (reference_step, reference))]
    assert differing(fused, reference) == []
    assert max(error(*pair) for pair in zip(*outs, strict=True)) < ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "aged"), STAGES)
def test_steps_over_blocks_of_two_widths(stage, aged):
    check(stage, aged, inputs(2, 195), [150, 192, 193, 195])


@pytest.mark.parametrize("prefill", ["int8", "model"])
@pytest.mark.parametrize(("stage", "aged"), [(0, 1), (3, 1)])
def test_prompt_behind_blocks_of_two_widths(stage, aged, prefill):
    """The second call unpacks blocks of both widths, to codes or to numbers; values have a scale a token."""
    pieces = {"v_scale": "token", "smooth_k": stage == 0, "prefill_compute": prefill}
    check(stage, aged, inputs(1, 200), [130, 199, 200], **pieces)


@needs_gpu
@pytest.mark.parametrize(("stage", "aged"), [(0, 20), (1, 30), (2, 60), (3, 10), (4, 0)])
@pytest.mark.parametrize("pieces", [{}, {"v_scale": "token"}, {"sink_num": 2}], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_long_contexts_of_two_widths(stage, aged, pieces, dim):
    check(stage, aged, inputs(2, 4_110, group=4, dim=dim), [2_000, 4_100, 4_101, 4_110], 66, **pieces)


@needs_gpu
@pytest.mark.large_memory  # the reference holds all scores of a call
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_long_context_stage_by_stage(dim):
    """One layer of 32k tokens, packed again between its steps; the bits of each side only fall."""
    fused, reference = (
        BudgetLayer(replace(layer_at(0, 0).spec, impl=impl), 33_000) for impl in ("triton", "reference")
    )
    qkv = inputs(1, 32_008, group=4, dim=dim)
    outs: list[list[torch.Tensor]] = [[], []]
    for at, run, one in ((0, fused_step, fused), (1, reference_step, reference)):
        outs[at] += feed(run, one, qkv, [*range(1_000, 32_001, 1_000)])
        for n, (stage, aged) in enumerate([(0, 100), (1, 0), (1, 400), (2, 250), (3, 499), (4, 0)]):
            one.take(changes.repacked(one, at_stage(one.spec, stage, aged), 516))
            step = tuple(x[:, :, 32_000 + n : 32_001 + n] for x in qkv)
            outs[at] += feed(run, one, step, [1])
    assert differing(fused, reference) == []
    assert max(error(*pair) for pair in zip(*outs, strict=True)) < ROUNDING


@pytest.mark.slow
def test_8_bits_err_as_little_as_int8():
    """K8V8 has INT8 numbers with a scale a block, `int8` with a scale a token: errors of the same size."""
    qkv = inputs(1, 192, kind="outlier")
    exact = feed(reference_step, make_layer(("none", {})), qkv, [191, 192])[1]
    found = feed(fused_step, layer_at(0, 0), qkv, [191, 192])[1]
    other = feed(fused_step, make_layer(("int8", {})), qkv, [191, 192])[1]
    assert error(found, exact) < 2 * error(other, exact)
