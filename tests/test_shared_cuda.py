"""A model that is used in several ways at once on a GPU.

Threads share the memory of captured steps, compiled steps run between eager calls, and memory is freed when the model
is not used.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import Case, case_id, cases, random_ids, tiny_llama

from qattn_hf import QAttnCache, patch, report

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

GREEDY = dict(do_sample=False, max_new_tokens=24)


@pytest.mark.parametrize("decode", ["graph", "eager"])
def test_threads_share_a_model(decode: str):
    model = patch(tiny_llama().cuda(), "turbo", decode=decode)
    prompts = [random_ids(1 + i % 3, 60 + 40 * (i % 4), seed=i).cuda() for i in range(24)]
    want = [model.generate(ids, **GREEDY) for ids in prompts]
    with ThreadPoolExecutor(3) as threads:
        got = list(threads.map(lambda ids: model.generate(ids, **GREEDY), prompts))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_compiled_steps_between_eager_calls(case: Case):
    """Whole models: what the compiled steps wrote, long and short calls after them read."""
    model, ids = patch(tiny_llama().cuda(), case[0], **case[1]), random_ids(2, 400).cuda()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    cache, plain = (QAttnCache.for_model(model, max_cache_len=512) for _ in range(2))
    with torch.inference_mode():
        for step, held in ((compiled, cache), (model, plain)):
            model(ids[:, :20], past_key_values=held)
            for t in range(20, 160):
                step(ids[:, t : t + 1], past_key_values=held)
        for start, end in ((160, 230), (230, 250)):
            got, want = (model(ids[:, start:end], past_key_values=held).logits for held in (cache, plain))
            assert torch.equal(got, want)
        assert all(torch.equal(t, plain.state_tensors()[name][0]) for name, (t, _) in cache.state_tensors().items())


@pytest.mark.parametrize("decode", ["graph", "eager"])
def test_memory_of_a_model_that_nobody_uses_is_free_at_once(decode: str):
    ids = random_ids(2, 100).cuda()
    patch(tiny_llama().cuda(), "turbo", decode=decode).generate(ids, **GREEDY)  # loads what torch keeps for good
    gc.collect()
    gc.disable()
    try:
        before = torch.cuda.memory_allocated()
        model = patch(tiny_llama(hidden_size=512).cuda(), "turbo", decode=decode)
        model.generate(ids, **GREEDY)
        assert report(model).to_dict()["decode"] == decode
        held = torch.cuda.memory_allocated() - before
        del model
        left = torch.cuda.memory_allocated() - before
    finally:
        gc.enable()
    assert held > 2**20 and left < 2**16
