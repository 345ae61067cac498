"""What only a GPU can show of the reference: the same codes, and a decode step that a CUDA graph can hold."""

from __future__ import annotations

import pytest
import torch
from helpers import Case, case_id, cases, feed, make_layer, random_ids, random_qkv, tiny_llama

from qattn_hf import QAttnCache, patch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


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
