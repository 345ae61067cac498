"""How `generate` runs its decode steps: the captured step and the pool, with a stand-in for CUDA graphs on a CPU."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from fake_graphs import GREEDY, IDS, FakeGraphs, as_on_a_gpu, path
from helpers import Case, case_id, cases, random_ids, tiny_llama
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

from qattn_hf import CapacityError, QAttnCache, patch, release, report, unpatch
from qattn_hf.cache import pool
from qattn_hf.generate.cuda_graph import graph
from qattn_hf.generate.patched import Runner
from qattn_hf.model._compat import CACHE


@pytest.fixture
def model(fake: FakeGraphs) -> LlamaForCausalLM:
    return patch(as_on_a_gpu(tiny_llama()), "turbo")


def eager(model: LlamaForCausalLM, ids: torch.Tensor = IDS, **kwargs: Any) -> Any:
    """Return the tokens of a new copy of the model without graphs."""
    split_int8 = patch(unpatch(copy.deepcopy(model)), model._qattn.recipe.method, decode="eager")
    return split_int8.generate(ids, **{**GREEDY, **kwargs})


def addresses(cache: QAttnCache) -> list[int]:
    return [tensor.data_ptr() for tensor, _ in cache.state_tensors().values() if tensor.numel()]


def padded(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = random_ids(3, tokens), torch.ones(3, tokens, dtype=torch.long)
    mask[0, :9] = ids[0, :9] = 0
    return ids, mask


@pytest.mark.product
@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_replays_give_the_tokens_of_eager(fake: FakeGraphs, case: Case):
    ids, mask = padded(160)
    both = [patch(as_on_a_gpu(tiny_llama()), case[0], **case[1], decode=how) for how in ("graph", "eager")]
    out, want = (
        m.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=42, return_dict_in_generate=True)
        for m in both
    )
    assert torch.equal(out.sequences, want.sequences)
    assert (fake.captured, fake.replayed) == (1, 40)  # the first token is the prompt's, the second warms up
    assert path(both[0]) == ("graph", None) and path(both[1]) == ("eager", None)
    for layer, other in zip(out.past_key_values.layers, want.past_key_values.layers, strict=True):
        assert all(torch.equal(t, other.state[name]) for name, t in layer.state.items())
        assert layer._used == other._used == 201 == int(layer.get_seq_length())


@pytest.mark.slow
def test_a_compiled_step_is_captured(fake: FakeGraphs, monkeypatch):
    """The first step runs eagerly under the watch, the second compiles, the third is captured; later calls replay."""
    asked, compile_ = [], torch.compile

    def without_inductor(call: Any, **options: Any) -> Any:  # which needs a C++ compiler
        asked.append(options["mode"])
        return compile_(call, **{**options, "backend": "aot_eager"})

    monkeypatch.setattr(torch, "compile", without_inductor)
    model = patch(as_on_a_gpu(tiny_llama()), "turbo", decode="compile")
    ids, mask = padded(110)
    call = dict(attention_mask=mask, do_sample=False, max_new_tokens=30, return_dict_in_generate=True)
    out = model.generate(ids, **call)
    assert path(model) == ("compile", None) and asked == ["default"]
    assert (fake.captured, fake.replayed) == (1, 27)
    want = patch(as_on_a_gpu(tiny_llama()), "turbo", decode="eager").generate(ids, **call)
    assert torch.equal(out.sequences, want.sequences)
    for layer, other in zip(out.past_key_values.layers, want.past_key_values.layers, strict=True):
        assert all(torch.equal(t, other.state[name]) for name, t in layer.state.items())
        assert layer._used == other._used and layer.edits == other.edits
    del out, layer  # else nobody could take these arenas
    gc.collect()
    assert torch.equal(model.generate(ids, **call).sequences, want.sequences)
    assert asked == ["default"] and fake.captured == 1 and fake.replayed == 27 + 29


def test_a_compiled_step_that_cannot_be_captured_says_so(fake: FakeGraphs, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda call, **options: lambda **inputs: call(**inputs))
    model = patch(as_on_a_gpu(tiny_llama()), "turbo", decode="compile")
    fake.error = RuntimeError("no such capture")
    with pytest.warns(UserWarning, match="without a CUDA graph.*no such capture"):
        out = model.generate(IDS, **GREEDY)
    assert torch.equal(out, eager(model)) and fake.replayed == 0
    assert path(model) == ("compile", "capturing it failed (no such capture)")


def test_the_next_call_replays_at_once(fake, model):
    gc.disable()  # a cache that only the garbage collector can free would hold its memory for long
    try:
        first, where = model.generate(IDS, **GREEDY), addresses(model._qattn.last.cache)
        assert (fake.captured, fake.replayed) == (1, 10)
        other = random_ids(2, 75, seed=5)  # the same number of blocks
        second = model.generate(other, **GREEDY)
    finally:
        gc.enable()
    assert addresses(model._qattn.last.cache) == where
    assert (fake.captured, fake.replayed) == (1, 21)
    assert torch.equal(first, eager(model)) and torch.equal(second, eager(model, other))
    assert torch.equal(model.generate(IDS, **GREEDY), first)


def test_a_cache_that_somebody_holds_is_left_alone(fake, model):
    held = model.generate(IDS, return_dict_in_generate=True, **GREEDY).past_key_values
    before = [tensor.clone() for tensor, _ in held.state_tensors().values()]
    model.generate(random_ids(2, 70, seed=5), **GREEDY)
    assert not set(addresses(held)) & set(addresses(model._qattn.last.cache))
    assert all(torch.equal(a, t) for a, (t, _) in zip(before, held.state_tensors().values(), strict=True))
    assert fake.captured == 2
    assert not model._qattn.pool.idle
    del held
    assert len(model._qattn.pool.idle) == 1


@pytest.mark.slow
def test_the_pool_is_bounded(fake, model, monkeypatch):
    monkeypatch.setattr(pool, "SIGNATURES", 5)  # which is more by default: each takes a call
    short = {**GREEDY, "max_new_tokens": 4}
    for rows in (1, 2, 3, 4, 5):
        model.generate(random_ids(rows, 70), **short)
    found = model._qattn.pool
    assert len(found.idle) == pool.IDLE and len(found.steps) == pool.IDLE + 1 == len(found.graphs)
    assert fake.captured == 5
    model.generate(random_ids(4, 70), **short)
    assert fake.captured == 5  # the last ones used are still there
    for name in range(4 * pool.SIGNATURES):
        inputs = {"output_hidden_states": bool(name % 2), "logits_to_keep": name}
        model.generate(random_ids(4, 70), **short, **inputs)
    assert len(found.graphs) <= pool.IDLE + 1 + pool.SIGNATURES


@pytest.mark.parametrize("how", [release, unpatch])
def test_memory_is_released(fake, model, how):
    want = model.generate(IDS, **GREEDY)
    model.generate(random_ids(1, 70), **GREEDY)
    patched = model._qattn
    layers = weakref.WeakSet(layer for found in patched.pool.idle for layer in found)
    layers.update(patched.last.cache.layers)
    assert len(layers) == 4 and len(patched.pool.graphs) == 2
    how(model)
    assert (len(layers), len(patched.pool.graphs), len(patched.pool.idle), patched.last.cache) == (0, 0, 0, None)
    if how is release:
        assert torch.equal(model.generate(IDS, **GREEDY), want) and fake.captured == 3


def test_a_held_cache_outlives_release(fake, model):
    held = model.generate(IDS, return_dict_in_generate=True, **GREEDY)
    release(model)
    assert len(model._qattn.pool.graphs) == 0
    more = torch.cat([held.sequences, IDS[:, :3]], 1)
    cache = copy.deepcopy(held.past_key_values)
    got = model.generate(more, past_key_values=held.past_key_values, **GREEDY)
    assert torch.equal(got, eager(model, more, past_key_values=cache))
    assert path(model) == ("graph", None)


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_of_a_model_start_without_memory(fake, model, how):
    want = model.generate(IDS, **GREEDY)
    del model._valid_auto_compile_criteria  # a lambda of this test
    copied = as_on_a_gpu(how(model))
    assert len(copied._qattn.pool.graphs) == 0 and copied._qattn.last.cache is None
    assert torch.equal(copied.generate(IDS, **GREEDY), want)
    assert fake.captured == 2


def decode_steps(model: LlamaForCausalLM, cache: QAttnCache) -> Any:
    """Prefill 100 tokens, and what then takes one token after the other."""
    token = model(random_ids(1, 100), past_key_values=cache).logits[:, -1:].argmax(-1)
    step = model.get_compiled_call(None)

    def steps(count: int) -> Any:
        nonlocal token
        for _ in range(count):
            span = torch.tensor([[[[0, 1]]]], dtype=torch.int32)
            out = step(input_ids=token, attention_mask=span, return_dict=True, **{CACHE: cache})
            token = out.logits.argmax(-1)
        return out

    return steps


@torch.no_grad()
def test_overflow_is_refused_before_a_replay(fake, model):
    cache = QAttnCache.for_model(model, max_cache_len=128)
    steps = decode_steps(model, cache)
    steps(28)
    before = [tensor.clone() for tensor, _ in cache.state_tensors().values()]
    with pytest.raises(CapacityError, match="nothing was written"):
        steps(1)
    assert fake.replayed == 27
    assert all(torch.equal(a, t) for a, (t, _) in zip(before, cache.state_tensors().values(), strict=True))
    cache.crop(-5)
    steps(5)
    assert (fake.captured, fake.replayed, int(cache.get_seq_length())) == (1, 32, 128)


@torch.no_grad()
@pytest.mark.parametrize("move", ["grow", "horizon", "rows"])
def test_moved_tensors_end_a_captured_step(fake, model, move):
    cache = QAttnCache.for_model(model)
    cache.plan(130)
    steps = decode_steps(model, cache)
    steps(4)
    if move == "grow":
        cache.plan(600)
    elif move == "horizon":
        cache.raise_horizon(100)
    else:
        cache.batch_select_indices(torch.tensor([0]))
    out = steps(4)
    assert (fake.captured, fake.replayed) == (2, 6)
    model._qattn.runner = Runner("eager")
    want = decode_steps(model, QAttnCache.for_model(model))(8)
    assert torch.equal(out.logits.argmax(-1), want.logits.argmax(-1)) and int(cache.get_seq_length()) == 108


CHANGES: dict[str, Any] = {
    "weights": lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.flip(0).clone()),
    "a module": lambda m: setattr(m.model.layers[1], "mlp", copy.deepcopy(m.model.layers[0].mlp)),
    "a hook": lambda m: m.model.layers[0].register_forward_hook(lambda module, args, out: out * 1.5),
    "a forward": lambda m: setattr(m.model.norm, "forward", torch.sigmoid),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_captured_anew(fake, change):
    model = patch(as_on_a_gpu(tiny_llama()), "int8", decode="graph")
    first = model.generate(IDS, **GREEDY)
    CHANGES[change](model)
    second = model.generate(IDS, **GREEDY)
    model._qattn.runner = Runner("eager")
    assert torch.equal(second, model.generate(IDS, **GREEDY)) and not torch.equal(first, second)
    assert fake.captured == 2


def test_weights_changed_in_place_need_no_capture(fake, model):
    first = model.generate(IDS, **GREEDY)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    second = model.generate(IDS, **GREEDY)
    assert torch.equal(second, eager(model)) and not torch.equal(first, second)
    assert fake.captured == 1


def test_a_hook_of_the_users_own_runs_at_every_step(fake, model):
    seen: list[int] = []
    handle = model.model.norm.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    model.generate(IDS, **GREEDY)
    assert seen == [70] + [1] * 11
    decode, reason = path(model)
    assert decode == "eager" and "forward hook" in reason and "lambda" in reason
    assert "forward hook" in " ".join(str(report(model)).split())
    handle.remove()
    model.generate(IDS, **GREEDY)
    assert path(model) == ("graph", None)


def test_outputs_are_the_callers_own(fake, model):
    wanted = dict(output_logits=True, output_hidden_states=True, return_dict_in_generate=True)
    out, want = model.generate(IDS, **wanted, **GREEDY), eager(model, **wanted)
    assert fake.replayed == 10
    for got, exact in zip(
        tree_leaves((out.logits, out.hidden_states)), tree_leaves((want.logits, want.hidden_states)), strict=True
    ):
        torch.testing.assert_close(got, exact, rtol=0, atol=0)
    assert out.past_key_values is model._qattn.last.cache


@torch.no_grad()
def test_inputs_are_copied_and_the_cache_is_handed_back(fake, model):
    cache = QAttnCache.for_model(model, max_cache_len=256)
    token = model(IDS, past_key_values=cache).logits[:, -1:].argmax(-1)
    step = model.get_compiled_call(None)
    call = {"attention_mask": torch.tensor([[[[0, 1]]]] * 2, dtype=torch.int32), CACHE: cache, "use_cache": True}
    outs = [step(input_ids=token + i, **call) for i in range(4)]
    assert fake.replayed == 3 and all(out.past_key_values is cache for out in outs)
    assert len({out.logits.data_ptr() for out in outs}) == 4
    assert not torch.equal(outs[2].logits, outs[3].logits)


def test_second_turn(fake, model):
    first = model.generate(IDS, return_dict_in_generate=True, **GREEDY)
    more = torch.cat([first.sequences, random_ids(2, 150, seed=4)], 1)
    split_int8 = copy.deepcopy(first.past_key_values)
    got = model.generate(more, past_key_values=first.past_key_values, **GREEDY)
    assert torch.equal(got, eager(model, more, past_key_values=split_int8))
    assert fake.captured == 2  # it grew
    again = torch.cat([got, IDS[:, :1]], 1)
    split_int8 = copy.deepcopy(first.past_key_values)
    got = model.generate(again, past_key_values=first.past_key_values, max_new_tokens=5, do_sample=False)
    assert torch.equal(got, eager(model, again, past_key_values=split_int8, max_new_tokens=5))
    assert fake.captured == 2  # it did not


@pytest.mark.parametrize(("size", "tokens"), [(23, 70), (1, 9)])
def test_chunks_of_one_token(fake, model, size, tokens):
    for _ in range(2):
        got = model.generate(IDS[:, :tokens], prefill_chunk_size=size, **GREEDY)
        assert torch.equal(got, eager(model, IDS[:, :tokens], prefill_chunk_size=size))
    assert path(model) == ("graph", None) and fake.captured == 1 + (size > 1)  # chunks of 23 tokens too


def test_inference_mode_comes_and_goes(fake, model):
    want = eager(model)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert torch.equal(model.generate(IDS, **GREEDY), want)
    assert fake.captured == 1 and path(model) == ("graph", None)


def test_sampling_is_that_of_eager(fake, model):
    found = []
    for run in (model.generate, lambda ids, **kwargs: eager(model, ids, **kwargs)):
        torch.manual_seed(3)
        found.append(run(IDS, do_sample=True, max_new_tokens=20))
    assert torch.equal(*found) and fake.replayed == 18


def test_calls_that_no_graph_can_stand_for(fake, model):
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(IDS, **GREEDY)
    assert path(model) == ("eager", "autocast is on")
    model.generate(IDS, max_new_tokens=2, do_sample=False)
    assert path(model) == ("eager", "no two decode steps had the same kind of inputs")
    for call in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 3}):
        model.generate(IDS[:1], disable_compile=True, **call, **GREEDY)
        assert path(model) == ("eager", "transformers did not ask for a compiled call")
    model._valid_auto_compile_criteria = lambda kwargs, config: False
    model.generate(IDS, **GREEDY)
    assert path(model) == ("eager", "transformers did not ask for a compiled call")
    assert fake.captured == 0


def test_idle_memory_goes_before_a_call_fails(fake, model, monkeypatch):
    model.generate(IDS, **GREEDY)
    model.generate(IDS[:1], **GREEDY)
    allocate, failed = pool.QAttnLayer.lazy_initialization, []

    def scarce(layer: Any, *args: Any) -> None:
        if model._qattn.pool.idle:
            failed.append(layer)
            raise torch.OutOfMemoryError("no memory")
        allocate(layer, *args)

    monkeypatch.setattr(pool.QAttnLayer, "lazy_initialization", scarce)
    ids = random_ids(5, 70)
    assert torch.equal(model.generate(ids, **GREEDY), eager(model, ids)) and len(failed) == 1
    monkeypatch.setattr(pool.QAttnLayer, "lazy_initialization", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        model.generate(random_ids(6, 70), **GREEDY)


def no_memory(*args: Any) -> None:
    raise torch.OutOfMemoryError("no memory")


def test_idle_memory_goes_before_a_capture_fails(fake, model, monkeypatch):
    held = model.generate(IDS, return_dict_in_generate=True, **GREEDY)
    model.generate(IDS[:1], **GREEDY)
    record = graph.record
    monkeypatch.setattr(graph, "record", lambda *args: no_memory() if model._qattn.pool.idle else record(*args))
    assert torch.equal(model.generate(IDS, **GREEDY), held.sequences)
    assert path(model) == ("graph", None) and fake.captured == 3 and not model._qattn.pool.idle
