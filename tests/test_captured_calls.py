"""Beam search and assisted generation over captured steps, with a stand-in for CUDA graphs on a CPU."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from fake_graphs import IDS, FakeGraphs, as_on_a_gpu, path
from helpers import Case, case_id, cases, random_ids, tiny_llama
from transformers import LlamaForCausalLM

from qattn_hf import QAttnCache, patch, unpatch
from qattn_hf.generate.cuda_graph import graph
from qattn_hf.model._compat import CACHE

BEAMS: dict[str, Any] = dict(num_beams=3, max_new_tokens=20, do_sample=False)
DRAFTS: dict[str, Any] = dict(prompt_lookup_num_tokens=3, max_new_tokens=60, do_sample=False)


def model_of(case: Case = ("turbo", {}), decode: str = "graph") -> LlamaForCausalLM:
    return patch(as_on_a_gpu(tiny_llama()), case[0], **case[1], decode=decode)


@pytest.mark.product
@pytest.mark.parametrize("call", [BEAMS, DRAFTS], ids=["beams", "drafts"])
@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_replays_give_the_tokens_of_eager(fake: FakeGraphs, case: Case, call: dict[str, Any]):
    model, other = model_of(case), model_of(case, "eager")
    ids = IDS[:1] if call is DRAFTS else IDS
    for _ in range(2):
        out, want = (m.generate(ids, **call, return_dict_in_generate=True) for m in (model, other))
        assert torch.equal(out.sequences, want.sequences)
        assert path(model) == ("graph", None)
        for layer, like in zip(out.past_key_values.layers, want.past_key_values.layers, strict=True):
            assert all(torch.equal(t, like.state[name]) for name, t in layer.state.items())
            assert layer._used >= int(layer.state["length"].max())
    assert fake.captured >= 1 and fake.replayed > 20


def test_beams_are_captured_once(fake: FakeGraphs):
    model = model_of()
    for replays in (18, 37):  # the first token is the prompt's, the second warms up
        model.generate(IDS, **BEAMS)
        assert (fake.captured, fake.replayed) == (1, replays)
    model.generate(IDS, **{**BEAMS, "do_sample": True})
    assert (fake.captured, fake.replayed) == (1, 56)


def test_drafts_of_a_length_are_captured_when_they_have_come_three_times(fake: FakeGraphs, monkeypatch):
    text = torch.tensor([[5, 6, 7, 8, 9] * 14])  # in which the last tokens are always found
    found = []
    for before in (graph.BEFORE_DRAFTS, 1000):
        monkeypatch.setattr(graph, "BEFORE_DRAFTS", before)
        before = fake.captured
        model_of().generate(text, **DRAFTS)
        found.append(fake.captured - before)
    assert found[0] > found[1]


def test_a_draft_models_steps_are_captured(fake: FakeGraphs):
    call = dict(max_new_tokens=60, do_sample=False)
    model, other = model_of(), model_of(decode="eager")
    draft, like = model_of(("int8", {})), model_of(("int8", {}), "eager")
    for drafts in (draft, like):  # else a model with random weights drafts one token a round
        drafts.generation_config.assistant_confidence_threshold = 0.0
    for seed in (0, 1):
        ids = random_ids(1, 40, seed=seed)
        want = other.generate(ids, assistant_model=like, **call)
        assert torch.equal(model.generate(ids, assistant_model=draft, **call), want)
    for drafts, captures in ((draft, True), (like, False)):
        steps = [step for _, kinds in drafts._qattn.pool.steps.values() for step in kinds.values()]
        assert any(isinstance(step, graph.CapturedStep) for step in steps) == captures
    assert draft._qattn.last.cache.layers[0].capacity >= 300, "rounds share one capacity"


def test_a_model_that_exits_early_to_draft_has_no_step_of_that_captured(fake: FakeGraphs, monkeypatch):
    model, other = model_of(), model_of(decode="eager")
    for drafts in (model, other):  # else random weights draft one token a round
        drafts.generation_config.assistant_confidence_threshold = 0.0
    record, layers = graph.record, []

    def noted(*args: Any) -> Any:
        layers.append(model.config.num_hidden_layers)
        return record(*args)

    monkeypatch.setattr(graph, "record", noted)
    for call in ({"assistant_early_exit": 1}, {}, {"assistant_early_exit": 1}, {}):
        runs = dict(max_new_tokens=16, do_sample=False, **call)
        assert torch.equal(model.generate(IDS[:1], **runs), other.generate(IDS[:1], **runs))
    assert set(layers) == {len(model.model.layers)}


def test_only_what_generate_asks_for_is_captured(fake: FakeGraphs):
    model = model_of()
    out = model.generate(IDS, **BEAMS, return_dict_in_generate=True)
    before, tokens = fake.replayed, torch.ones(6, 1, dtype=torch.long)
    for _ in range(3):
        model(input_ids=tokens, **{CACHE: out.past_key_values})
    assert fake.replayed == before
    for twin in (copy.deepcopy(out.past_key_values), pickle.loads(pickle.dumps(out.past_key_values))):
        assert isinstance(twin, QAttnCache) and twin.captured_call is None
    model.generate(IDS, do_sample=False, max_new_tokens=4)
    assert "_compiled_call_impl" not in vars(model)


def test_unpatch_takes_the_override_off(fake: FakeGraphs):
    model = model_of()
    want = unpatch(copy.deepcopy(model)).generate(IDS, **BEAMS)
    model.generate(IDS, **BEAMS)
    assert "_compiled_call_impl" in vars(model)
    assert torch.equal(unpatch(model).generate(IDS, **BEAMS), want) and "_compiled_call_impl" not in vars(model)


def test_a_model_that_its_user_compiled_keeps_that_call(fake: FakeGraphs):
    model = model_of()
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    model.generate(IDS, **{**BEAMS, "max_new_tokens": 4})
    assert model._compiled_call_impl is compiled and fake.captured == 0
    unpatch(model)
    assert model._compiled_call_impl is compiled


def test_a_compiled_call_after_a_beam_search_is_traced(fake: FakeGraphs):
    model, other = model_of(), model_of(decode="eager")
    caches = []
    for m in (model, other):
        m.generate(IDS, **BEAMS)
        cache = QAttnCache.for_model(m, max_cache_len=128)
        m(IDS, **{CACHE: cache})
        caches.append(cache)
    step = torch.compile(model, backend="eager")
    token = torch.ones(2, 1, dtype=torch.long)
    with torch.no_grad():
        out, want = step(token, **{CACHE: caches[0]}).logits, other(token, **{CACHE: caches[1]}).logits
    assert torch.equal(out, want)
