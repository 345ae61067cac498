"""What every method must do inside a transformers model."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import Case, random_ids, tiny_llama
from transformers import CompileConfig, LlamaForCausalLM

from qattn_hf import CapacityError, QAttnCache, load_recipe, patch, report, unpatch
from qattn_hf.methods import get_method

GREEDY = dict(do_sample=False, max_new_tokens=20)
# Compiling takes seconds, and a compiled step sees only a method's tensors: a ring of codes, an unquantized ring, a
# ring with sinks, or no ring. Compiled kernels run with every method (`kernels/test_compiled_steps_kernel.py`).
some_methods = pytest.mark.parametrize("method", ["turbo", "kivi", "sinkq", "int8"])


@pytest.fixture
def patched(model: LlamaForCausalLM, case: Case) -> LlamaForCausalLM:
    return patch(model, case[0], **case[1])


@pytest.mark.parametrize("kind", ["forward", "generate"])
def test_unpatch_restores_bit_for_bit(model: LlamaForCausalLM, case: Case, kind: str):
    ids = random_ids(2, 90)
    run = (lambda: model(ids).logits) if kind == "forward" else (lambda: model.generate(ids, **GREEDY))
    with torch.inference_mode():
        stock = run()
        assert patch(model, case[0], **case[1]) is model
        run()
        unpatch(model)
        assert torch.equal(run(), stock)


def test_logits_show_that_something_is_packed(model: LlamaForCausalLM, case: Case):
    """Fed in chunks, so that the past is read; equal to full precision nothing would be packed."""
    ids = random_ids(2, 300)
    with torch.inference_mode():
        stock, tokens = model(ids).logits, model.generate(ids, **GREEDY)
        patch(model, case[0], **case[1])
        first = model(ids[:, :200])
        second = model(ids[:, 200:], past_key_values=first.past_key_values).logits
        error = (second - stock[:, 200:]).abs().max().item()
        assert error < 0.2  # logits of this model spread over about 1
        if case[0] == "none":
            assert error < 1e-5
            assert torch.equal(model.generate(ids, **GREEDY), tokens)
        else:
            assert error > 1e-5


def test_row_of_a_padded_batch_equals_the_row_alone(patched: LlamaForCausalLM):
    ids, mask = random_ids(3, 120), torch.ones(3, 120, dtype=torch.long)
    mask[0, :17] = mask[2, :60] = 0
    ids[mask == 0] = 0
    both = patched.generate(ids, attention_mask=mask, **GREEDY)
    for row, start in ((0, 17), (1, 0), (2, 60)):
        alone = patched.generate(ids[row : row + 1, start:], **GREEDY)
        assert torch.equal(alone[0, -20:], both[row, -20:])


def test_short_calls_have_the_logits_of_single_steps(patched: LlamaForCausalLM):
    ids = random_ids(2, 140)
    whole, steps = patched(ids[:, :110]).past_key_values, patched(ids[:, :110]).past_key_values
    many = patched(ids[:, 110:], past_key_values=whole).logits
    one = torch.cat([patched(ids[:, t : t + 1], past_key_values=steps).logits for t in range(110, 140)], 1)
    # linear layers round keys of 30 tokens and of one otherwise, which may flip a code; a 4-bit code moves 0.1
    torch.testing.assert_close(many, one, atol=5e-3, rtol=0)


def test_prompt_lookup_equals_greedy_beyond_the_noise(patched: LlamaForCausalLM):
    """A first difference is allowed only where the top two logits are nearer than what another cut of calls moves."""
    ids = random_ids(1, 40).repeat(1, 3)
    greedy = patched.generate(ids, output_logits=True, return_dict_in_generate=True, do_sample=False, max_new_tokens=40)
    looked = patched.generate(ids, prompt_lookup_num_tokens=5, do_sample=False, max_new_tokens=40)
    different = (greedy.sequences[0] != looked[0]).nonzero()
    if len(different):
        step = int(different[0]) - ids.shape[1]
        whole = patched(greedy.sequences[:, : ids.shape[1] + step]).logits[0, -1]
        top = greedy.logits[step][0].topk(2).values
        assert top[0] - top[1] < 2 * (whole - greedy.logits[step][0]).abs().max()


def test_second_turn_continues_the_first(patched: LlamaForCausalLM):
    ids, mask = random_ids(2, 100), torch.ones(2, 100, dtype=torch.long)
    mask[0, :10] = ids[0, :10] = 0
    first = patched.generate(ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY)
    cache = first.past_key_values
    assert isinstance(cache, QAttnCache) and int(cache.get_seq_length()) == 119
    longer = torch.cat([first.sequences, random_ids(2, 30, seed=4)], 1)
    wide = torch.cat([mask, torch.ones(2, 50, dtype=torch.long)], 1)
    second = patched.generate(longer, attention_mask=wide, past_key_values=cache, **GREEDY)
    assert second.shape == (2, 170) and int(cache.get_seq_length()) == 169
    by_hand = patched.model(ids, attention_mask=mask).past_key_values
    for t in range(100, 119):  # the first turn's tokens one by one, then the second prompt in one call
        patched(
            longer[:, t : t + 1], attention_mask=wide[:, : t + 1], past_key_values=by_hand, **_positions(wide, t, t + 1)
        )
    out = patched(longer[:, 119:], attention_mask=wide, past_key_values=by_hand, **_positions(wide, 119, 150))
    assert torch.equal(out.logits[:, -1].argmax(-1), second[:, 150])


def _positions(mask: torch.Tensor, start: int, end: int) -> dict[str, torch.Tensor]:
    return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, start:end]}


def test_beams_score_what_their_tokens_score(patched: LlamaForCausalLM):
    """Every beam, fed alone through a fresh cache, has the score that beam search gave it: its rows moved rightly."""
    ids = random_ids(2, 120)
    beams = patched.generate(
        ids,
        num_beams=3,
        num_return_sequences=3,
        output_scores=True,
        return_dict_in_generate=True,
        length_penalty=0.0,
        **GREEDY,
    )
    for row, tokens in enumerate(beams.sequences):
        out = patched(tokens[None, :120])
        total, cache = torch.tensor(0.0), out.past_key_values
        for token in tokens[120:]:
            total = total + out.logits[0, -1].log_softmax(-1)[token]
            out = patched(token.view(1, 1), past_key_values=cache)
        torch.testing.assert_close(total, beams.sequences_scores[row], atol=1e-3, rtol=0)  # 20 sums in fp32


def test_chunked_prefill_keeps_lengths(patched: LlamaForCausalLM):
    ids = random_ids(2, 150)
    whole = patched.generate(ids, return_dict_in_generate=True, **GREEDY)
    chunked = patched.generate(ids, prefill_chunk_size=50, return_dict_in_generate=True, **GREEDY)
    for a, b in zip(whole.past_key_values.layers, chunked.past_key_values.layers, strict=True):
        assert torch.equal(a.state["closed"], b.state["closed"]) and torch.equal(a.state["length"], b.state["length"])


def test_report_is_read_from_the_tensors(patched: LlamaForCausalLM, case: Case):
    assert report(patched).to_dict()["kv_bytes"] == 0
    cache = patched.generate(random_ids(3, 300), return_dict_in_generate=True, **GREEDY).past_key_values
    data = report(cache).to_dict()
    assert data == report(patched).to_dict()
    walked = sum(t.numel() * t.element_size() for layer in cache.layers for t, _ in layer.state_tensors().values())
    assert data["kv_bytes"] == walked == sum(row["bytes"] for row in data["layers"])
    assert len(data["layers"]) == 2 and all(row["packed_tokens"] >= 3 * 128 for row in data["layers"])
    assert data["packed_tokens"] + data["open_tokens"] == 3 * 319
    assert (
        data["kv_bytes_full_precision"] == 2 * 3 * 319 * 2 * 2 * 16 * 4
    )  # layers, rows, tokens, heads, K and V, dim, fp32
    assert data["method"] == case[0] and data["impl"] == "reference" and data["recipe"].items() >= case[1].items()
    assert data["effective_bits"] <= data["effective_bits_total"]
    text = str(report(cache))
    assert case[0] in text and str(data["packed_tokens"]) in text and "reference" in text


def test_yaml_is_the_defaults(method: str):
    recipe = load_recipe(method)
    assert recipe.method == method and recipe.settings == get_method(method)()
    assert recipe.settings.model_fields_set == set(get_method(method).model_fields)


@some_methods
def test_decode_step_is_one_graph_at_fixed_addresses(model: LlamaForCausalLM, method: str):
    patch(model, method)
    torch._dynamo.utils.counters.clear()
    ids = random_ids(2, 70)
    cache, plain = (QAttnCache.for_model(model, max_cache_len=400) for _ in range(2))
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        other = model(ids, past_key_values=plain).logits[:, -1:].argmax(-1)
        addresses = [t.data_ptr() for t, _ in cache.state_tensors().values()]
        for _ in range(160):
            token = step(token, past_key_values=cache).logits.argmax(-1)
            other = model(other, past_key_values=plain).logits.argmax(-1)
    assert torch.equal(token, other)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert [t.data_ptr() for t, _ in cache.state_tensors().values()] == addresses
    assert cache.layers[0].state["length"].tolist() == [230, 230]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [pytest.param(method, marks=pytest.mark.exhaustive) for method in ("turbo", "kivi", "sinkq")] + ["int8"]
)
def test_generate_compiles_at_most_three_graphs(model: LlamaForCausalLM, method: str):
    patch(model, method)
    torch._dynamo.utils.counters.clear()
    ids, padded = random_ids(3, 70), torch.ones(3, 70, dtype=torch.long)
    padded[0, :9] = 0
    compiled = CompileConfig(fullgraph=True, backend="aot_eager", mode="default")
    compiled._compile_all_devices = True
    whole = torch.ones_like(padded)
    calls = [(ids, padded, 20), (ids, whole, 20), (ids[:1], whole[:1], 20), (ids, padded, 60), (ids, whole, 125)]
    for tokens, mask, new in calls:
        kwargs = dict(attention_mask=mask, do_sample=False, max_new_tokens=new)
        got = model.generate(tokens, compile_config=compiled, **kwargs)
        assert report(model).to_dict()["decode"] == "compile"
        assert torch.equal(got, model.generate(tokens, **kwargs))
        assert report(model).to_dict()["decode"] == "eager"
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


def test_hand_made_cache_serves_generate_and_forward(model: LlamaForCausalLM, method: str):
    ids = random_ids(2, 100)
    patch(model, method)
    want = model.generate(ids, **GREEDY)
    cache = QAttnCache.for_model(model, max_cache_len=128)
    assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), want)
    with pytest.raises(CapacityError, match="max_cache_len"):
        model.generate(ids, past_key_values=QAttnCache.for_model(model, max_cache_len=110), max_new_tokens=50)
    short = QAttnCache.for_model(model, max_cache_len=64)
    fits = short.layers[0].capacity - 4  # whole blocks; one may have more tokens
    ids = random_ids(2, fits + 40)
    model(ids[:, :fits], past_key_values=short)
    before = {name: t.clone() for name, (t, _) in short.state_tensors().items()}
    with pytest.raises(CapacityError, match="nothing was written"):
        model(ids[:, fits:], past_key_values=short)
    assert all(torch.equal(before[name], t) for name, (t, _) in short.state_tensors().items())
    other = QAttnCache.for_model(tiny_llama(), method="int8")
    model(ids, past_key_values=other)
    assert report(other).to_dict()["method"] == "int8"


@pytest.mark.product(most=1)
@some_methods
def test_a_cache_goes_on_after_compiled_steps(model: LlamaForCausalLM, method: str):
    """A compiled `generate`, then a long call, a short one, a crop, a copy and a second `generate` give the same
    results as after eager steps, although the host did not count the compiled steps."""
    patch(model, method)
    ids, more = random_ids(2, 20), random_ids(2, 170, seed=3)
    compiled = CompileConfig(fullgraph=True, backend="aot_eager", mode="default")
    compiled._compile_all_devices = True
    found = []
    for how in ({"compile_config": compiled}, {}):
        wanted = dict(do_sample=False, return_dict_in_generate=True, **how)
        out = model.generate(ids, max_new_tokens=90, **wanted)
        cache = out.past_key_values
        with torch.inference_mode():
            logits = [model(more[:, a:b], past_key_values=cache).logits for a, b in ((0, 60), (60, 75))]
        cache.crop(-20)
        cache = copy.deepcopy(cache)
        text = torch.cat([out.sequences[:, :-1], more[:, :90]], 1)  # the cache holds all but 35 of these
        second = model.generate(text, past_key_values=cache, max_new_tokens=60, **wanted).sequences
        found.append((out.sequences, *logits, second, cache))
    *got, cache = found[0]
    *want, other = found[1]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert int(cache.get_seq_length()) == 258
    tensors = other.state_tensors()
    assert all(torch.equal(tensor, tensors[name][0]) for name, (tensor, _) in cache.state_tensors().items())
