"""Long prompts of `generate` in chunks: which prompts are split, the chunks, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_graphs import as_on_a_gpu, path
from helpers import random_ids, tiny_llama
from small_types import SHARED_KEYS, tiny
from transformers import CompileConfig, LlamaForCausalLM
from transformers.generation import GenerationMode

from qattn_hf import QAttnCache, patch, report
from qattn_hf.generate import long_prompts
from qattn_hf.model._compat import CACHE

CHUNK = 100  # in place of the default, which would take minutes on a CPU
GREEDY: dict[str, Any] = dict(max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True)
WHOLE = {"prefill_chunk_size": 1000}
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prompts, "PREFILL_CHUNK", CHUNK)


def generate(model: LlamaForCausalLM, ids: torch.Tensor | None, **kwargs: Any) -> tuple[Any, list[int]]:
    """What `generate` returns, and how many tokens each call of the decoder had before the first single step."""
    calls: list[int] = []

    def count(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        given = inputs.get("input_ids")
        calls.append((inputs["inputs_embeds"] if given is None else given).shape[1])

    hook = model.model.register_forward_pre_hook(count, with_kwargs=True)
    out = model.generate(ids, **{**GREEDY, **kwargs})
    hook.remove()
    return out, calls[: calls.index(1)] if 1 in calls else calls


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 130 and 250 tokens: of the first row's tokens none is in the first chunk."""
    ids, mask = random_ids(2, 250), torch.ones(2, 250, dtype=torch.long)
    ids[0, :120] = mask[0, :120] = 0
    return ids, mask


@pytest.mark.parametrize("beams", [1, 2])
def test_a_long_prompt_is_cut_as_prefill_chunk_size_does(beams):
    ids, mask = padded()
    model = patch(tiny_llama(), "turbo")
    out, calls = generate(model, ids, attention_mask=mask, num_beams=beams)
    assert calls[:3] == [100, 100, 50]
    assert report(model).to_dict()["prefill_chunk_size"] == CHUNK
    want, _ = generate(model, ids, attention_mask=mask, num_beams=beams, prefill_chunk_size=CHUNK)
    assert torch.equal(out.sequences, want.sequences)
    assert all(torch.equal(a, b) for a, b in zip(out.logits, want.logits, strict=True))


def test_prompts_of_a_chunk_have_the_numbers_of_one_call():
    """And so has each first chunk; what follows reads that from codes."""
    model, ids = patch(tiny_llama(), "turbo"), random_ids(2, CHUNK)
    out, calls = generate(model, ids)  # with its answer it is longer than a chunk
    assert calls == [CHUNK]
    assert torch.equal(out.logits[0], model(ids, logits_to_keep=1).logits[:, -1])
    short, calls = generate(model, ids[:, :60])
    assert calls == [60] and report(model).to_dict()["prefill_chunk_size"] is None
    assert torch.equal(short.logits[0], model(ids[:, :60], logits_to_keep=1).logits[:, -1])


def test_only_codes_make_a_difference():
    ids, mask = padded()
    found = {}
    for method in ("none", "kivi"):
        model = patch(tiny_llama(), method)
        cut, whole = (generate(model, ids, attention_mask=mask, prefill_chunk_size=size)[0] for size in (CHUNK, 999))
        found[method] = (cut.logits[0] - whole.logits[0]).abs().max()
    assert found["none"] < 1e-5  # sums in another order, in fp32
    assert found["kivi"] > 1e-3


def test_the_users_own_size_wins():
    model, ids = patch(tiny_llama(), "turbo"), random_ids(2, 250)
    assert generate(model, ids, prefill_chunk_size=1000)[1] == [250]
    assert generate(model, ids, prefill_chunk_size=90)[1] == [90, 90, 70]
    model.generation_config.prefill_chunk_size = 125
    assert generate(model, ids)[1] == [125, 125]
    assert report(model).to_dict()["prefill_chunk_size"] == 125


@pytest.mark.parametrize("method", ["none", "kivi"])
def test_a_prompt_in_model_precision_stays_one_call(method):
    """It would read earlier tokens from their codes, which it does not need to."""
    model, ids = patch(tiny_llama(), method), random_ids(1, 250)
    assert generate(model, ids)[1] == [250]
    assert report(model).to_dict()["prefill_chunk_size"] is None


@pytest.mark.parametrize(
    "why", ["hidden states", "embeddings", "a cache with tokens", "drafts", "a RoPE of its length"]
)
def test_what_stays_one_call(why):
    model, ids = patch(tiny_llama(**({"rope_parameters": ROPE} if "RoPE" in why else {})), "turbo"), random_ids(2, 250)
    inputs: dict[str, Any] = {}
    if why == "hidden states":
        inputs = {"output_hidden_states": True}
    elif why == "embeddings":
        inputs, ids = {"inputs_embeds": model.get_input_embeddings()(ids)}, None
    elif why == "a cache with tokens":
        inputs = {CACHE: QAttnCache.for_model(model)}
        model(ids[:, :40], past_key_values=inputs[CACHE])
    elif why == "drafts":
        inputs, ids = {"prompt_lookup_num_tokens": 2}, ids[:1]
    _, calls = generate(model, ids, **inputs)
    assert calls[0] >= 250 - 40 * ("tokens" in why)  # drafts are verified with the prompt
    assert report(model).to_dict()["prefill_chunk_size"] is None


def test_layers_that_are_not_packed_take_the_prompt_whole():
    """Layers that read what others have packed do not matter."""
    shares = {"num_hidden_layers": 6, **SHARED_KEYS}
    cases = ({}, "packed", CHUNK), ({}, "exact", None), (shares, "packed", CHUNK)
    for changes, sliding, chunk in cases:
        model = patch(tiny("gemma4_text", **changes), "turbo", sliding=sliding)
        cache, config = QAttnCache.for_model(model), model.generation_config
        asked = model, config, {CACHE: cache}, GenerationMode.GREEDY_SEARCH, cache, 250
        assert long_prompts.prefill_chunk(*asked) == chunk


@pytest.mark.parametrize("by", ["recipe", "caller"])
def test_compiled_prompts_stay_one_call(by, monkeypatch):
    """transformers would compile the chunks, each length anew."""
    model = patch(as_on_a_gpu(tiny_llama()), "turbo", decode="compile" if by == "recipe" else "auto")
    monkeypatch.setattr(type(model), "get_compiled_call", lambda self, config: self.__call__)
    inputs = {} if by == "recipe" else {"compile_config": CompileConfig()}
    assert generate(model, random_ids(2, 250), **inputs)[1] == [250]


def test_steps_after_chunks_are_captured(fake):
    model = patch(as_on_a_gpu(tiny_llama()), "turbo")
    for _ in range(2):
        model.generate(random_ids(2, 250), **GREEDY)
        assert path(model) == ("graph", None) and report(model).to_dict()["prefill_chunk_size"] == CHUNK
    assert fake.captured == 1
