"""Latent attention (MLA) in kernels as only a GPU shows it: the sizes of real models in bf16, long contexts, and steps
in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from helpers import Case, case_id
from latent_cases import INT8, TURBO, Inputs, Sizes, error, feed, inputs, make_layer, spec_of, step
from small_configs import small_config
from test_fused_kernels import dequantize, differing
from transformers import AutoModelForCausalLM

from qattn_hf import patch, report
from qattn_hf.layer.handle import Handle
from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.support import unsupported
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.reference import reference_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CASES: list[Case] = [INT8, TURBO, ("turbo", {"bits": 2}), ("kivi", {"group_size": 64}), ("fp8", {}), ("none", {})]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
V3, LITE, MINICPM = Sizes(512, 64, 128), Sizes(512, 64, 16), Sizes(256, 32, 40)
# Weights are rounded to the dtype before they are multiplied, to 2^-9 in bf16, and so are outputs; in fp16 to 2^-12.
ROUNDING = {torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float32: 2e-3}


def of_dtype(qkv: Inputs, dtype: torch.dtype) -> Inputs:
    q, k, v = (x.to(dtype) for x in qkv)
    return q, k, v


def exact(layer: QAttnLayer, q: torch.Tensor, tokens: int) -> torch.Tensor:
    """fp64 attention of the last query over what a layer's first row holds, scaled as `step` scales."""
    rope, latent = dequantize(layer, tokens)
    keys = torch.cat([latent, rope], -1)
    return ((q.double() @ keys.mT) * q.shape[-1] ** -0.5).softmax(-1) @ latent


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_prompt_steps_and_a_later_prompt(case: Case, dtype: torch.dtype):
    """State bit for bit and outputs near the reference's: padding, drafts, blocks that close in each kind of call."""
    qkv = of_dtype(inputs(2, 400, LITE), dtype)
    one, other = make_layer(case, 512), make_layer(case, 512)
    cuts = [150, 151, 154, 186, 255, 256, 257, 400]
    want, got = (feed(run, layer, qkv, cuts, first=5) for run, layer in ((reference_step, one), (fused_step, other)))
    assert differing(one, other) == []
    assert max(map(error, got, want)) < ROUNDING[dtype]


@pytest.mark.parametrize("tokens", [1, 3, 32, 100])
@pytest.mark.parametrize("sizes", [V3, LITE, MINICPM], ids=str)
@pytest.mark.parametrize("case", [INT8, TURBO], ids=case_id)
def test_heads_of_real_models(case: Case, sizes: Sizes, tokens: int):
    qkv = of_dtype(inputs(2, 300 + tokens, sizes), torch.bfloat16)
    one, other = make_layer(case, 512), make_layer(case, 512)
    cuts = [300, 300 + tokens]
    want, got = (feed(run, layer, qkv, cuts, first=7) for run, layer in ((reference_step, one), (fused_step, other)))
    assert differing(one, other) == []
    assert max(map(error, got, want)) < ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("tokens", [65, 1000, 4100])  # none closes a block, which the step would read open
@pytest.mark.parametrize("sizes", [V3, LITE], ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_step_over_a_long_context_against_fp64(case: Case, sizes: Sizes, tokens: int):
    """The context shared by many programs, whose parts are merged."""
    qkv = of_dtype(inputs(1, tokens, sizes), torch.bfloat16)
    layer = make_layer(case, tokens + 64)
    feed(fused_step, layer, qkv, [tokens - 1])
    got = step(fused_step, layer, qkv, tokens - 1, tokens)[0]
    assert error(got, exact(layer, qkv[0][:, :, -1:], tokens)) < ROUNDING[torch.bfloat16]


def test_capacity_does_not_change_results():
    qkv = of_dtype(inputs(2, 300, V3), torch.bfloat16)
    results = [feed(fused_step, make_layer(TURBO, capacity), qkv, [299, 300])[2] for capacity in (320, 8192)]
    assert torch.equal(*results)


@pytest.mark.parametrize("sizes", [V3, LITE], ids=str)
@pytest.mark.parametrize("case", [INT8, TURBO], ids=case_id)
def test_replays_of_a_captured_step_are_eager_steps(case: Case, sizes: Sizes):
    """No sync and no allocation that a capture forbids, past the end of a block."""
    if reason := unsupported(spec_of(case), 1, sizes.rope, sizes.latent):  # `QATTN_SHARED_KIB` limits the memory
        pytest.skip(reason)
    q, k, v = of_dtype(inputs(2, 200, sizes), torch.bfloat16)
    eager, captured = make_layer(case, 256, impl="triton"), make_layer(case, 256, impl="triton")
    spans = {n: torch.tensor([[0, n]] * 2, dtype=torch.int32).cuda() for n in (100, 1)}

    def call(layer: QAttnLayer, x: Inputs) -> torch.Tensor:
        return layer.attend(x[0], Handle(layer, x[1], x[2]), spans[x[0].shape[2]], Scores(q.shape[-1] ** -0.5))[0]

    def part(start: int, end: int) -> Inputs:
        return q[:, :, start:end].contiguous(), k[:, :, start:end].contiguous(), v[:, :, start:end].contiguous()

    for layer in (eager, captured):
        layer.lazy_initialization(k, v)
        call(layer, part(0, 100))
        call(layer, part(100, 101))  # compiles what a capture must not load
    token = part(101, 102)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(captured, token)
    for t in range(101, 200):
        new = part(t, t + 1)
        for x, y in zip(token, new, strict=True):
            x.copy_(y)
        graph.replay()
        assert torch.equal(out, call(eager, new))
    assert torch.equal(captured.arena, eager.arena)


@pytest.mark.parametrize("case", [INT8, TURBO, ("kivi", {})], ids=case_id)
def test_a_model_generates_in_a_graph(case: Case):
    """Replayed steps generate the tokens of eager steps, over two blocks."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config("deepseek_v3"), dtype=torch.bfloat16).eval().cuda()
    ids = torch.randint(3, 90, (2, 70), generator=torch.Generator().manual_seed(3)).cuda()
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    made = []
    for decode in ("eager", "auto"):
        patch(model, case[0], family=False, decode=decode, **case[1])
        made.append(model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=130, min_new_tokens=130))
        assert report(model).to_dict()["impl"] == "triton"
    assert torch.equal(*made)
