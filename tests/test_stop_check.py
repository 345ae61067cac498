"""Stop checks that `generate` reads one step late, with a stand-in for CUDA graphs on a CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fake_graphs import GREEDY, IDS, FakeGraphs, as_on_a_gpu, path
from helpers import tiny_llama
from transformers import DynamicCache, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.generation import utils as generation

from qattn_hf import patch, unpatch
from qattn_hf.model._compat import CACHE


@pytest.fixture
def model(fake: FakeGraphs) -> LlamaForCausalLM:
    return patch(as_on_a_gpu(tiny_llama()), "turbo")


def eager(model: LlamaForCausalLM, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Return the tokens of a new copy of the model without graphs."""
    return patch(unpatch(copy.deepcopy(model)), "turbo", decode="eager").generate(ids, do_sample=False, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("returned", [True, False])
def test_deferred_stop(fake, model, monkeypatch, returned):
    """With replayed steps the stop is read one step late, which runs one step too many.

    A cache that `generate` returns drops that step. An internal cache keeps it, where nobody can see it.
    """
    event = type("Event", (), {"record": lambda self: None, "synchronize": lambda self: None})
    monkeypatch.setattr(generation.torch, "Event", lambda **kwargs: event())
    kwargs = dict(max_new_tokens=58, eos_token_id=int(eager(model, IDS, max_new_tokens=58)[0, 100]), pad_token_id=0)
    ids = IDS[:1]
    supported = generation.DeferredStopCheck.is_supported
    on_a_gpu = staticmethod(lambda device, *args, **kwargs: supported(torch.device("cuda"), *args, **kwargs))
    monkeypatch.setattr(generation.DeferredStopCheck, "is_supported", on_a_gpu)
    for stop, more in ((kwargs, 1), ({"max_new_tokens": 58}, 0)):  # it ends by itself, or with the capacity of 128
        want = eager(model, ids, **stop)
        captured, replayed = fake.captured, fake.replayed
        out = model.generate(ids, return_dict_in_generate=returned, do_sample=False, **stop)
        assert torch.equal(out.sequences if returned else out, want)
        held = want.shape[1] - 1
        warm_up = fake.captured - captured
        assert fake.replayed - replayed == held - ids.shape[1] - warm_up + more
        cache, held = model._qattn.last.cache, held + (0 if returned else more)
        assert int(cache.get_seq_length()) == held
        assert all(layer.state["length"].tolist() == [held] for layer in cache.layers)
        assert all(layer._used <= layer.capacity for layer in cache.layers)
    assert path(model) == ("graph", None)


def test_the_stop_is_deferred_where_steps_are_replayed(fake, model):
    deferred = generation.DeferredStopCheck.is_supported
    gpu = torch.device("cuda")
    model.generate(IDS, **GREEDY)
    cache = model._qattn.last.cache
    assert deferred(gpu, cache, True, False)
    assert not deferred(gpu, cache, True, True)  # an assistant's
    assert not deferred(torch.device("cpu"), cache, True, False)
    assert not deferred(gpu, DynamicCache(), False, False)
    model.generate(IDS, past_key_values=cache, disable_compile=True, **GREEDY)
    assert not deferred(gpu, cache, True, False)


class NoWaits(StoppingCriteria):
    """Lets whatever waits for the device fail, from the fifth token on; an event may be waited for."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.tokens += 1
        torch.cuda.set_sync_debug_mode("error" if 5 <= self.tokens < 20 else "default")
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("sampled", [False, True])
def test_no_step_waits_for_the_device(sampled):
    model = patch(tiny_llama().to("cuda", torch.bfloat16), "turbo")
    counted = NoWaits()
    try:
        out = model.generate(
            IDS.cuda(), do_sample=sampled, max_new_tokens=30, stopping_criteria=StoppingCriteriaList([counted])
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.shape[1] == IDS.shape[1] + 30 and path(model) == ("graph", None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_an_answer_that_ends_by_itself():
    model = patch(tiny_llama().to("cuda", torch.bfloat16), "turbo")
    ids = IDS[:1].cuda()
    want = eager(model, ids, max_new_tokens=40)
    stop = int(want[0, ids.shape[1] + 25])
    kwargs = dict(do_sample=False, max_new_tokens=40, eos_token_id=stop, pad_token_id=0)
    out = model.generate(ids, return_dict_in_generate=True, **kwargs)
    answer = out.sequences
    assert torch.equal(answer, want[:, : answer.shape[1]]) and answer[0, -1] == stop
    assert int(out[CACHE].get_seq_length()) == answer.shape[1] - 1
