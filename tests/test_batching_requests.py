"""Continuous batching: valid and invalid requests, and the capacity of a pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batching import NEW, answer, outputs, running
from helpers import tiny_llama
from test_continuous_batching import alone, batched, config, needs_pages, prompts_of
from transformers import (
    LlamaConfig,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qattn_hf import UnsupportedError, patch, report
from qattn_hf.errors import QAttnError
from qattn_hf.generate.continuous import transformers_api

pytestmark = needs_pages


BAD = {
    "empty": ([], "empty"),
    "outside": ([1, 97], "97 is outside"),
    "negative": ([-1], "-1 is outside"),
    "text": (["a"], "integers"),
    "fraction": ([1.5], "integers"),
    "beyond the pool": ([1] * 512, "512 tokens of the pool"),
    "no room for its answer": ([1] * 510, "at most 2 new tokens"),
}


@pytest.mark.parametrize("answers", [1, 2])
def test_prompts_that_cannot_be_served_fail_alone(answers: int):
    """A prompt with several answers fails once an answer, or `generate_batch` would wait for them."""
    model, good = patch(tiny_llama(), "none"), prompts_of(5, 33)
    bad = [prompt for prompt, _ in BAD.values()]
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    pool = ContinuousBatchingConfig(num_blocks=8, page_size=64, max_batch_tokens=64)
    sampled = {"do_sample": True, "top_k": 1, "num_return_sequences": answers} if answers > 1 else {}
    made = model.generate_batch([good[0], *bad, good[1]], config(max_new_tokens=NEW, **sampled), pool)
    found = list(made.values())
    assert len(found) == answers * (len(bad) + 2)
    for index, (_, words) in enumerate(BAD.values(), 1):
        for one in found[index * answers : (index + 1) * answers]:
            assert one.status == transformers_api.RequestStatus.FAILED and words in one.error
    right = [alone(model, prompt, max_new_tokens=NEW) for prompt in good]
    assert [one.generated_tokens for one in found[:answers]] == [right[0]] * answers
    assert [one.generated_tokens for one in found[-answers:]] == [right[1]] * answers


def test_prompts_beyond_the_positions_fail_alone():
    model, (good, long) = patch(tiny_llama(max_position_embeddings=64), "turbo"), prompts_of(20, 64)
    with running(model) as manager:
        assert (manager.longest, manager.room(20)) == (64, 44)
        for prompt, settings in ((long, {}), (good, {"max_new_tokens": 45})):
            with pytest.raises(QAttnError, match="64 tokens of the model's positions"):
                manager.add_request(prompt, **settings)
        assert answer(manager, good, max_new_tokens=44) == alone(model, good, max_new_tokens=44)


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "default"}, 64),
        ({"rope_type": "dynamic", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, 64),
    ],
)
def test_positions_are_those_that_rope_reaches(rope: dict[str, Any], positions: int):
    from qattn_hf.generate.continuous.admission import positions_of

    parameters = {"rope_theta": 10000.0, **rope}
    assert positions_of(LlamaConfig(max_position_embeddings=64, rope_parameters=parameters)) == positions


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 10**9}, "at most 1,019 new tokens"),
    ({"max_new_tokens": 0}, "1 or more"),
    ({"max_new_tokens": -3}, "1 or more"),
    ({"max_new_tokens": "5"}, "1 or more"),
    ({"eos_token_id": "x"}, "integer"),
    ({"eos_token_id": [1, None]}, "integer"),
    ({"request_id": 5}, "a text"),
    ({"temperature": -1}, "temperature is 0"),
    ({"temperature": float("nan")}, "temperature is 0"),
    ({"temperature": 1e-9}, "temperature is 0"),
    ({"top_p": 0}, "above 0"),
    ({"top_k": -1}, "0 or more"),
    ({"seed": -1}, "from 0 to"),
    ({"repetition_penalty": 1.1}, "one request of a batch"),
]


def test_settings_that_no_request_may_have():
    model, (prompt,) = patch(tiny_llama(), "none"), prompts_of(5)
    want = alone(model, prompt, max_new_tokens=NEW)
    with running(model) as manager:
        for settings, words in REFUSED:
            with pytest.raises(QAttnError, match=words):
                manager.add_request(prompt, **settings)
            assert answer(manager, prompt) == want, settings


def test_an_answer_without_a_limit_ends_with_the_pool():
    model, (prompt,) = patch(tiny_llama(), "none"), prompts_of(60)
    with running(model, blocks=2, max_new_tokens=None) as manager:
        assert answer(manager, prompt) == alone(model, prompt, max_new_tokens=68)


def test_an_id_belongs_to_one_request_at_a_time():
    model, prompts = patch(tiny_llama(), "none"), prompts_of(5, 33)
    with running(model) as manager:
        manager.add_request(prompts[0], request_id="mine", max_new_tokens=60)
        with pytest.raises(QAttnError, match="'mine' is in use"):
            manager.add_request(prompts[1], request_id="mine")
        assert outputs(manager, ["mine"])["mine"].generated_tokens == alone(model, prompts[0], max_new_tokens=60)
        assert answer(manager, prompts[1], request_id="mine") == alone(model, prompts[1], max_new_tokens=NEW)


def test_a_manager_that_is_kept_serves_again():
    model, (prompt,) = patch(tiny_llama(), "none"), prompts_of(70)
    for _ in range(2):
        made = model.generate_batch([prompt, []], config(max_new_tokens=NEW), persistent_manager=True)
        good, bad = made.values()
        assert good.generated_tokens == alone(model, prompt, max_new_tokens=NEW) and "empty" in bad.error
    model.destroy_cached_continuous_batching_manager()


@pytest.mark.slow
def test_each_request_has_settings_of_its_own():
    """Beside others and alone: a seed fixes the draws, temperature 0 and top_k 1 are the likeliest token."""
    model, prompts = patch(tiny_llama(), "none"), prompts_of(5, 33, 33)
    wishes = [
        {"seed": 1, "do_sample": True, "temperature": 2.0},
        {"seed": 1, "do_sample": True, "top_p": 0.9, "top_k": 20},
        {"do_sample": False},
        {"temperature": 0},
        {"do_sample": True, "top_k": 1},
        {"do_sample": True, "top_p": 1e-6},
        {"do_sample": True, "min_p": 1.0},
    ]
    with running(model, do_sample=True, batching={"return_logprobs": True}) as manager:
        asked = [(prompt, wish) for prompt in prompts for wish in wishes]
        ids = [manager.add_request(prompt, **wish) for prompt, wish in asked]
        found = outputs(manager, ids)
        together = [found[one].generated_tokens for one in ids]
        for (prompt, wish), tokens in zip(asked, together, strict=True):
            if "seed" in wish:
                assert answer(manager, prompt, **wish) == tokens
                assert answer(manager, prompt, **{**wish, "seed": 2}) != tokens
            else:
                assert tokens == alone(model, prompt, max_new_tokens=NEW)
        assert all(len(one.logprobs) == NEW and max(one.logprobs) <= 0 for one in found.values())


def test_tokens_are_left_out_as_transformers_does():
    from qattn_hf.generate.continuous.sampling import Sampling, warp

    scores = torch.randn(6, 97, generator=torch.Generator().manual_seed(0)) * 3
    settings = [Sampling(True, 0.5 + row, 3 * row, 1 - 0.1 * row, 0.05 * row) for row in range(6)]
    for row, (one, found) in enumerate(zip(settings, warp(scores, settings), strict=True)):
        want = TemperatureLogitsWarper(one.temperature)(None, scores[row : row + 1])
        for warper in (
            TopKLogitsWarper(one.top_k) if one.top_k else None,
            TopPLogitsWarper(one.top_p) if one.top_p < 1 else None,
            MinPLogitsWarper(one.min_p) if one.min_p else None,
        ):
            want = want if warper is None else warper(None, want)
        assert torch.equal(found, want[0])


def test_draws_follow_the_probabilities():
    from qattn_hf.generate.continuous.sampling import Draw, Sampling, choose

    rows, scores = 20000, torch.randn(8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    seeds = [None if row % 2 else row for row in range(rows)]
    draws = [Draw(Sampling(True, seed=seed), "one", row) for row, seed in enumerate(seeds)]
    tokens, logprobs = choose(scores.repeat(rows, 1), draws, logprobs=True)
    want = scores.softmax(-1)
    found = tokens.bincount(minlength=8) / rows
    assert (found - want).abs().max() < 5 * (0.25 / rows) ** 0.5  # five deviations of the likeliest share, at most
    assert logprobs is not None and torch.allclose(logprobs, want.log()[tokens])


def test_logits_that_are_not_finite_spoil_one_row():
    from qattn_hf.generate.continuous.sampling import Draw, Sampling, choose

    scores = torch.randn(3, 97, generator=torch.Generator().manual_seed(0))
    seeded = [Draw(Sampling(True, seed=5, top_p=0.9), "one", 7)] * 3
    want, _ = choose(scores, seeded, logprobs=False)
    scores[1] = torch.nan
    got, _ = choose(scores, seeded, logprobs=False)
    assert (got[0], got[2]) == (want[0], want[2])


def test_a_pool_off_a_gpu_is_small(monkeypatch: pytest.MonkeyPatch):
    memory = "transformers.generation.continuous_batching.cache.get_device_and_memory_breakdown"
    monkeypatch.setattr(memory, lambda: (torch.device("cpu"), 2**31, 0, 0))
    model, (prompt,) = patch(tiny_llama(), "turbo"), prompts_of(5)
    made = model.generate_batch([prompt], config(max_new_tokens=2))
    assert [one.generated_tokens for one in made.values()] == [alone(model, prompt, max_new_tokens=2)]
    pages = report(model).to_dict()["continuous_batching"]
    assert pages["bytes"] < 2**30 and pages["blocks"] * pages["page_tokens"] == 32768


def test_a_pool_off_a_gpu_is_bounded_in_bytes():
    """Rows of many requests too, of a model with heads as people run them."""
    from qattn_hf.generate.continuous.model_pages import pages_of_model
    from qattn_hf.generate.continuous.pool import HOST_BYTES, bound_on_host

    model = patch(tiny_llama(head_dim=128, num_hidden_layers=8, num_key_value_heads=4), "none")
    given = SimpleNamespace(max_requests_per_batch=1024, num_blocks=None, allow_block_sharing=True)
    bound_on_host(pages_of_model(model), given, None)
    per_token = 8 * 2 * 4 * 128 * 4  # layers, keys and values, heads, dims, bytes of float32
    assert 0.7 * HOST_BYTES < given.num_blocks * 64 * per_token < HOST_BYTES or given.num_blocks * 64 == 32768
    assert given.max_requests_per_batch <= given.num_blocks


def test_rows_of_long_requests_are_within_the_bound_off_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """Masks of a sink pool have room for all positions of a row, and rows of kept prefixes have them too."""
    memory = "transformers.generation.continuous_batching.cache.get_device_and_memory_breakdown"
    monkeypatch.setattr(memory, lambda: (torch.device("cpu"), 2**33, 0, 0))
    monkeypatch.setattr("qattn_hf.generate.continuous.pool.HOST_BYTES", bound := 2**22)
    model = patch(tiny_llama(max_position_embeddings=2**19), "turbo")
    model.generate_batch(prompts_of(*[5] * 8), config(max_new_tokens=2))
    pages = report(model).to_dict()["continuous_batching"]
    assert 0.5 * bound < pages["bytes"] <= bound and pages["requests"] == 2


def test_a_pool_that_does_not_fit_is_refused_in_words(monkeypatch: pytest.MonkeyPatch):
    memory = "transformers.generation.continuous_batching.cache.get_device_and_memory_breakdown"
    monkeypatch.setattr(memory, lambda: (torch.device("cpu"), 2**24, 0, 0))
    model = patch(tiny_llama(), "turbo")
    with pytest.raises(QAttnError, match="Ask for fewer blocks"), running(model, blocks=10**6):
        pass


@pytest.mark.parametrize("setting", [{"stop_strings": ["a"]}, {"num_beams": 2}])
def test_generation_configs_that_would_be_ignored_are_refused(setting: dict[str, Any]):
    model, prompts = patch(tiny_llama(), "none"), prompts_of(5)
    with pytest.raises(UnsupportedError, match=next(iter(setting))):
        batched(model, prompts, **setting)
