"""What only a GPU can show of the reference: the same codes, and a decode step that a CUDA graph can hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import SAGE1, Case, case_id, cases, feed, make_layer, random_ids, random_qkv, tiny_llama

from qattn_hf import QAttnCache, patch, report
from qattn_hf.attention import stock_cache
from qattn_hf.bench.timing import capture
from qattn_hf.methods import get_method
from qattn_kernels.layer.scores import Scores
from qattn_kernels.step.stock_cache import attend_over

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_codes_are_those_of_the_cpu(case: Case):
    qkv = random_qkv(2, 200)
    cpu, gpu = make_layer(case), make_layer(case)
    on_cpu = feed(cpu, *qkv, [150, 170, *range(171, 201)])
    on_gpu = feed(gpu, *(x.cuda() for x in qkv), [150, 170, *range(171, 201)])
    different = [name for name, t in cpu.state.items() if not torch.equal(t, gpu.state[name].cpu())]
    assert [name for name in different if not name.startswith("v_")] == []  # skips of sparse V sit on sums of weights
    assert ((on_gpu.cpu() - on_cpu).norm() / on_cpu.norm()) < 1e-3  # weights on an edge may round to the next code


@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_decode_step_fits_a_cuda_graph(case: Case):
    """No sync and no allocation that a capture forbids; replays give the tokens of eager steps, past a block's end."""
    model = patch(tiny_llama().cuda(), case[0], **case[1])
    ids = random_ids(2, 70).cuda()
    captured, eager = (QAttnCache.for_model(model, max_cache_len=256) for _ in range(2))
    with torch.inference_mode():
        token = model(ids, past_key_values=captured).logits[:, -1:].argmax(-1)
        other = model(ids, past_key_values=eager).logits[:, -1:].argmax(-1)
        other = model(other, past_key_values=eager).logits.argmax(-1)  # warms up what a capture must not load
        token.copy_(model(token, past_key_values=captured).logits.argmax(-1))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            token.copy_(model(token, past_key_values=captured).logits.argmax(-1))
        for _ in range(100):
            graph.replay()
            other = model(other, past_key_values=eager).logits.argmax(-1)
            assert torch.equal(token, other)
    assert captured.layers[0].state["length"].tolist() == [171, 171]


def test_generate_through_transformers_own_compile():
    model = tiny_llama().cuda()
    ids = random_ids(2, 70).cuda()
    patch(model, "turbo")
    eager = model.generate(ids, max_new_tokens=40, do_sample=False)
    patch(model, "turbo", decode="compile")
    assert torch.equal(model.generate(ids, max_new_tokens=40, do_sample=False), eager)


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_our_attention_over_stock_caches(how):
    """Kernels in the prefill; the steps over a static cache are compiled by transformers."""
    model, ids = tiny_llama(head_dim=64).cuda(), random_ids(2, 300).cuda()
    mask = torch.ones_like(ids)
    mask[0, :37] = 0
    with torch.inference_mode():
        want = model(ids, attention_mask=mask).logits[mask == 1]
        patch(model, "sage2", cache="model")
        got = model(ids, attention_mask=mask).logits[mask == 1]
        chosen = model(ids).logits[:, -1].argmax(-1)
    assert report(model).to_dict()["impl"] == "triton"
    assert 1e-3 < (got - want).norm() / want.norm() < 0.03
    text = model.generate(ids, max_new_tokens=20, do_sample=False, **how)
    assert text.shape == (2, 320)
    assert torch.equal(text[:, 300], chosen)


@pytest.mark.parametrize("settings", [{}, {"bits": 4, "smooth_v": True}, SAGE1], ids=str)
def test_attention_over_a_stock_cache_never_waits(settings):
    q, k, v = (x.cuda() for x in random_qkv(2, 200, dim=64))
    attention_mask, offset = torch.ones(2, 200, dtype=torch.bool, device="cuda"), torch.tensor(100, device="cuda")
    spec = replace(get_method("sage2")(cache="model", **settings).last_layer_spec(2), impl="triton")

    def run() -> torch.Tensor:
        made = stock_cache.mask(2, 100, 200, offset, attention_mask, torch.device("cuda"))
        assert made is not None
        return attend_over(q[:, :, 100:], k, v, made[:, 0, 0, 1:] != 0, made[:, 0, 0, 0], spec, Scores(0.125))[0]

    want = run()  # kernels get compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want)


def test_a_replay_of_the_bench_keeps_what_it_reads():
    """Otherwise later tensors take the freed memory, and captured steps read these."""

    def step_to(out: torch.Tensor):
        ones = torch.ones_like(out)
        return lambda: out.copy_(ones)

    out = torch.zeros(1 << 20, device="cuda")
    steps = [step_to(out)]
    steps[0]()
    replay = capture(steps, out.device)
    del steps
    later = [torch.full_like(out, 7) for _ in range(4)]
    out.zero_()
    replay()
    assert bool((out == 1).all()) and len(later) == 4
