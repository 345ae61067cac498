"""Latent attention (MLA) in Triton against its specification: the same state bit for bit, outputs within what products
in fp16 cost. Without a GPU in Triton's interpreter: few heads, short contexts."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import DEVICE, Case, case_id, spoil
from latent_cases import INT8, TURBO, Sizes, error, feed, inputs, make_layer, spec_of, step
from small_configs import small_config
from test_fused_kernels import closes_again, differing
from transformers import AutoModelForCausalLM

from qattn_hf import patch, report
from qattn_hf.layer.handle import Handle
from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels import chip
from qattn_kernels.launch import plan
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.support import unsupported
from qattn_kernels.step import kernels
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.reference import reference_step
from qattn_kernels.step.warm import LayerShape, launches

pytestmark = pytest.mark.gpu
poisoned = pytest.mark.usefixtures("poison")
CASES: list[Case] = [
    INT8,
    TURBO,
    ("turbo", {"bits": 2}),
    ("turbo", {"k_bits": 4, "v_bits": 2, "buffer_size": 128}),
    ("turbo", {"k_bits": 2, "v_bits": 4, "v_scale": "token"}),
    ("turbo", {"softmax": "sas", "sas_threshold": -1e9}),
    ("kivi", {"k_bits": 4, "v_bits": 3, "group_size": 64, "residual_length": 20}),
    ("kivi", {"bits": 2, "group_size": 32, "residual_length": 0}),
    ("none", {}),
    ("fp8", {}),
    ("nf4", {}),
]


def check(case: Case, qkv, cuts: list[int], first: int = 0, scores: Scores | None = None) -> None:
    one, other = make_layer(case), make_layer(case)
    want = feed(reference_step, one, qkv, cuts, first, scores)
    got = feed(fused_step, other, qkv, cuts, first, scores)
    assert differing(one, other) == []
    # queries and weights in fp16; SAS in the kernels and in the reference are within 1e-3 of each other
    limit = 2e-3 if case[1].get("softmax") else 1e-3
    assert max(map(error, got, want)) < limit


@pytest.mark.slow
@poisoned
@pytest.mark.product("int8")
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_state_and_outputs_are_the_references(case: Case):
    """Long and short calls, padding, tokens that are not finite, blocks that close in each kind of call."""
    qkv = inputs(2, 170)
    qkv[1][1, 0, 30, 1] = math.nan
    qkv[2][0, 0, 61, 2] = math.inf
    check(case, qkv, [62, 65, 129, 130, 170], first=5)


SHAPES = [Sizes(128, 32, 16), Sizes(32, 16, 5), Sizes(16, 64, 32), Sizes(512, 64, 3)]


@poisoned
@pytest.mark.product("turbo-Sizes(latent=128, rope=32, heads=16)-1")
@pytest.mark.parametrize("tokens", [1, 3, 32] if DEVICE == "cuda" else [1, 32])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.parametrize("case", [TURBO, INT8], ids=case_id)
def test_sizes_of_latents_and_numbers_of_heads(case: Case, sizes: Sizes, tokens: int):
    """Queries of one program and of several, over a packed block and over open tokens."""
    check(case, inputs(1, 66 + tokens, sizes), [66, 66 + tokens])


@poisoned
@pytest.mark.parametrize("case", [TURBO, INT8, ("none", {})], ids=case_id)
def test_a_later_prompt_sees_the_past(case: Case):
    check(case, inputs(2, 180), [100, 101, 180], first=3)


@poisoned
@pytest.mark.parametrize("case", [TURBO, ("none", {})], ids=case_id)
@pytest.mark.parametrize("window", [0, 20])
def test_padding_after_the_tokens_reads_their_row(case: Case, window: int):
    """In a first prompt, a short call and a later prompt."""
    qkv, scores, layers = inputs(2, 140), Scores(0.1, window=window), (make_layer(case), make_layer(case))
    for start, end, after in ((0, 70, 31), (70, 75, 3), (75, 140, 40)):
        want, got = (
            step(run, layer, qkv, start, end, 2, scores, after)
            for run, layer in zip((reference_step, fused_step), layers, strict=True)
        )
        assert max(map(error, got, want)) < 1e-3  # queries and weights in fp16
        assert not got[0][0, :, :2].any() and (bool(window) or got[0][1].any(-1).all())
    assert differing(*layers) == []


@pytest.mark.parametrize("case", [TURBO, INT8], ids=case_id)
def test_several_queries_are_single_steps(case: Case):
    """Drafted tokens, across the end of a block, in one call: the numbers of one by one."""
    qkv = inputs(1, 66)
    steps, drafts = make_layer(case), make_layer(case)
    one = feed(fused_step, steps, qkv, [63, 64, 65, 66])[2::2]
    many = feed(fused_step, drafts, qkv, [63, 66])[2]
    assert differing(steps, drafts) == []
    torch.testing.assert_close(many, torch.cat(one, 2), atol=1e-5, rtol=1e-4)  # shares of scales round in fp16


@pytest.mark.parametrize("case", [TURBO, INT8], ids=case_id)
@pytest.mark.parametrize("cuts", [[2], [63, 64], [64]], ids=["not yet", "step", "prefill"])
def test_a_block_that_closes_again_leaves_nothing_of_the_first_time(case: Case, cuts: list[int]):
    """After a crop the block has other tokens, a masked one where a finite one stood, and the other way round."""
    first, again = inputs(1, 64), inputs(1, 64, seed=1)
    first[1][0, 0, 20, 1] = math.nan
    again[2][0, 0, 63 if len(cuts) == 2 else 40, 1] = math.nan
    one, other = make_layer(case), make_layer(case)
    for run, layer in ((reference_step, one), (fused_step, other)):
        closes_again(run, layer, first, again, cuts)
    assert differing(one, other) == []


@pytest.mark.parametrize("asked", [{"softcap": 5.0}, {"window": 40}, {"sinks": (0.5, 2.0, -1.0, 4.0)}], ids=str)
def test_softcap_window_and_sinks(asked: dict):
    if "sinks" in asked:
        asked = {"sinks": torch.tensor(asked["sinks"], device=DEVICE)}
    check(TURBO, inputs(1, 130), [128, 129, 130], scores=Scores(0.3, **asked))


def test_queries_that_are_not_finite_have_nan_outputs_and_no_other():
    qkv = inputs(1, 70)
    qkv[0][0, 1, 5, 70], qkv[0][0, 2, 69, 3] = math.nan, math.inf
    outputs = [feed(run, make_layer(INT8), qkv, [66, 70]) for run in (reference_step, fused_step)]
    for want, got in zip(*outputs, strict=True):
        assert torch.equal(got.isnan(), want.isnan())
        torch.testing.assert_close(got, want, atol=5e-3, rtol=1e-2, equal_nan=True)
    assert outputs[1][0].isnan().any(-1).sum() == outputs[1][2].isnan().any(-1).sum() == 1


@pytest.mark.parametrize("case", [TURBO, INT8], ids=case_id)
def test_unused_blocks_are_never_read(case: Case):
    qkv = inputs(1, 70)
    clean, dirty = make_layer(case), make_layer(case)
    for layer in (clean, dirty):
        feed(fused_step, layer, qkv, [66])
    spoil(dirty, 2)
    got, want = (step(fused_step, layer, qkv, 66, 70)[0] for layer in (dirty, clean))
    assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("case", [TURBO, INT8], ids=case_id)
def test_a_plan_does_what_was_recorded(case: Case, monkeypatch: pytest.MonkeyPatch):
    """Later calls of the same shapes, in other layers, are launched from a plan."""
    monkeypatch.setattr(plan, "_plans", {})
    computed: list[int] = []
    run = kernels.run_step
    monkeypatch.setattr(kernels, "run_step", lambda step: (computed.append(step.query.shape[2]), run(step))[1])
    qkv = inputs(2, 98)

    def serve(layer: QAttnLayer) -> list[torch.Tensor]:
        out, start = [], 0
        for end in (36, 37, 64, 98):
            q, k, v = (x[:, :, start:end] for x in qkv)
            if not layer.is_initialized:
                layer.lazy_initialization(k, v)
            span = torch.tensor([[0, end - start]] * 2, dtype=torch.int32, device=DEVICE)
            out.append(layer.attend(q, Handle(layer, k, v), span, Scores(0.1))[0])
            start = end
        return out

    with monkeypatch.context() as unplanned:
        unplanned.setattr(
            "qattn_kernels.step.operator.planned", lambda key, inputs, compute, *arguments, arenas: compute(*arguments)
        )
        want = serve(make_layer(case, impl="triton"))
    first, second = make_layer(case, impl="triton"), make_layer(case, impl="triton")
    serve(first)
    computed.clear()
    assert all(torch.equal(a, b) for a, b in zip(want, serve(second), strict=True))
    assert computed == []


def test_kernels_are_compiled_ahead():
    """`patch` on a GPU follows the calls of a layer of latents, whose sides and queries differ in their channels."""
    shape = LayerShape(spec_of(TURBO, "triton"), 16, 1, 64, torch.bfloat16, torch.device("cpu"), v_dim=512)
    names = {one.kernel.fn.__name__ for one in launches(shape)}
    assert {"short_kernel", "latent_decode_kernel", "merge_kernel", "long_kernel", "latent_prefill_kernel"} <= names


REASONS = [
    (TURBO, (64, 512), None),
    (INT8, (64, 512), None),
    (("turbo", {"block_kv": 128, "buffer_size": 128}), (64, 512), "blocks have 128 tokens"),
    (("turbo", {"block_kv": 128, "buffer_size": 128}), (32, 256), None),
    (("turbo", {"block_kv": 32, "buffer_size": 32}), (64, 512), "32 tokens"),
    (("turbo", {"sparse_v_tau": 1e-3}), (64, 512), "sparse V"),
    (("paper_turbo", {"buffer_scale": "universal"}), (64, 512), "buffer_scale is 'universal'"),
    (("kivi", {"bits": 3, "group_size": 64}), (64, 512), None),
    (TURBO, (64, 576), "latents of latent attention (MLA) have 576 channels"),
    (TURBO, (24, 512), "RoPE parts of latent attention (MLA) have 24 channels"),
]


@pytest.mark.parametrize(("case", "sizes", "reason"), REASONS, ids=lambda x: str(x)[:40])
@pytest.mark.usefixtures("as_h200")
def test_what_the_kernels_take(case: Case, sizes: tuple[int, int], reason: str | None):
    rope, latent = sizes
    found = unsupported(spec_of(case), 1, rope, latent)
    assert found is None if reason is None else reason in found


@pytest.mark.usefixtures("as_h200")
def test_wide_latents_need_the_shared_memory_of_hopper(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chip, "properties", lambda device: chip.H200._replace(block=163 * chip.KIB))
    assert "need 227 KiB of shared memory a block, and this GPU has 163" in unsupported(spec_of(TURBO), 1, 64, 512)
    assert unsupported(spec_of(TURBO), 1, 64, 128) is None


@pytest.mark.parametrize("case", [INT8, TURBO], ids=case_id)
def test_a_model_generates_through_the_kernels(case: Case):
    """Interpreted without a GPU: a padded prompt, steps and the end of a block; logits near the reference's."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config("deepseek_v3"), dtype=torch.float32).eval().to(DEVICE)
    ids = torch.randint(3, 90, (2, 62), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    made: dict[str, torch.Tensor] = {}
    for impl in ("reference", "triton"):
        patch(model, case[0], impl=impl, family=False, **case[1])
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=4, min_new_tokens=4, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        made[impl] = torch.stack(out.logits)
        assert report(model).to_dict()["impl"] == impl
    spread = made["reference"].std()
    assert (made["triton"] - made["reference"]).abs().max() < 0.05 * spread
