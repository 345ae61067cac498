"""A model in several hands: threads, classifier-free guidance, and the end of its life."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fake_graphs import GREEDY, IDS, as_on_a_gpu
from helpers import random_ids, tiny_llama

from qattn_hf import QAttnCache, patch, release, report
from qattn_hf.cache.pool import Pool


@pytest.mark.parametrize("decode", ["auto", "eager"])
def test_threads_share_a_model(fake, decode):
    model = patch(as_on_a_gpu(tiny_llama()), "int8", decode=decode)
    prompts = [random_ids(1 + i % 2, 60 + 10 * (i % 3), seed=i) for i in range(9)]
    short = {**GREEDY, "max_new_tokens": 6}
    want = [model.generate(ids, **short) for ids in prompts]

    def answer(ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        out = model.generate(ids, **short)
        return out, report(model).to_dict()["packed_tokens"]

    with ThreadPoolExecutor(3) as threads:
        got = list(threads.map(answer, prompts))
    assert all(torch.equal(a, b) for (a, _), b in zip(got, want, strict=True))
    assert [count for _, count in got] == [ids.numel() + 5 * len(ids) for ids in prompts]


def test_a_thread_that_made_no_cache_reports_the_newest():
    model = patch(tiny_llama(), "int8")
    model(random_ids(1, 30))
    thread = threading.Thread(target=lambda: model(random_ids(1, 50)))
    thread.start()
    thread.join()
    assert report(model).to_dict()["packed_tokens"] == 30  # this thread's own
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: report(model).to_dict()["packed_tokens"]).result() == 50
        release(model)
        assert other.submit(lambda: report(model).to_dict()["layers"]).result() == []
    assert report(model).to_dict()["layers"] == []


def test_the_garbage_collector_may_return_memory_while_some_is_taken(fake, monkeypatch):
    """Layers come back at any moment: here, whenever the pool looks at one."""
    model = patch(as_on_a_gpu(tiny_llama()), "int8")
    caches = [
        model.generate(random_ids(1, 60, seed=i), return_dict_in_generate=True, **GREEDY).past_key_values
        for i in range(4)
    ]
    want = model.generate(IDS, **GREEDY)
    fits = Pool.take.__globals__["_fits"]

    def look(*args: Any) -> bool:
        if caches:
            caches.pop()
        return fits(*args)

    monkeypatch.setitem(Pool.take.__globals__, "_fits", look)
    for rows in (1, 2, 1, 3, 2):
        model.generate(random_ids(rows, 60), **GREEDY)
    assert torch.equal(model.generate(IDS, **GREEDY), want)


@pytest.mark.parametrize("negative", [False, True])
def test_guidance_has_a_cache_of_its_own_that_no_report_shows(negative):
    model = patch(tiny_llama(), "turbo")
    kwargs: dict[str, Any] = dict(guidance_scale=1.5, **GREEDY)
    if negative:
        kwargs["negative_prompt_ids"] = IDS[:, :20]
    out = model.generate(IDS, return_dict_in_generate=True, **kwargs)
    cache = model._qattn.last.cache
    assert cache is out.past_key_values and int(cache.get_seq_length()) == 81
    assert report(model).to_dict()["kv_bytes"] == report(out.past_key_values).to_dict()["kv_bytes"]
    assert model(IDS).past_key_values is model._qattn.last.cache  # the next forward is what it shows again


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("how", ["turbo", "copied", "pickled"])
def test_a_model_that_nobody_uses_is_gone_at_once(fake, how, runs):
    model = tiny_llama()
    patch(model, "turbo")
    if how == "copied":
        model = copy.deepcopy(model)
    elif how == "pickled":
        model = pickle.loads(pickle.dumps(model))
    gc.collect()
    gc.disable()
    try:
        if runs:
            as_on_a_gpu(model)
            model.generate(IDS, **GREEDY)
            model(IDS)
        cache = QAttnCache.for_model(model)
        left = weakref.ref(model), weakref.ref(model.lm_head.weight)
        del model
        assert [ref() for ref in left] == [None, None]
        del cache
    finally:
        gc.enable()


def test_copies_are_bound_to_themselves(fake):
    """Not to the model that they were copied from."""
    model = patch(tiny_llama(), "turbo")
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            copied.lm_head.weight.zero_()
        assert not torch.equal(copied.generate(IDS, **GREEDY), model.generate(IDS, **GREEDY))
        assert copied._qattn.last.cache is not model._qattn.last.cache


def test_another_thread_that_compiles_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    model, chance = patch(tiny_llama(), "turbo"), random.Random(0)
    want, packed = model.generate(IDS, **GREEDY), report(model).to_dict()["packed_tokens"]

    def begins_or_ends(*_: Any) -> None:  # torch sets this for the whole process while one thread compiles
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", chance.random() < 0.3)

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(begins_or_ends)
    assert torch.equal(model.generate(IDS, **GREEDY), want)
    assert report(model).to_dict()["packed_tokens"] == packed
