"""Continuous batching: whatever one request brings, the others get what `generate` gives them alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import DEVICE, tiny_llama
from test_continuous_batching import alone, batched, config, prompts_of
from transformers import (
    LlamaConfig,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qattn_hf import UnsupportedError, patch, report
from qattn_hf.continuous import transformers_api
from qattn_hf.continuous.batch import Held, batches
from qattn_hf.errors import QAttnError

pytestmark = pytest.mark.skipif(
    transformers_api.continuous_api is None, reason="this transformers has no pool that packed pages fit"
)
NEW = 8  # tokens of an answer
SECONDS = 60  # after which an answer is missing: none of these takes one second on an idle machine


@contextmanager
def running(model: PreTrainedModel, blocks: int = 16, **settings: Any) -> Iterator[Any]:
    """A manager over a pool of so many blocks of 64 tokens."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    batching = {"num_blocks": blocks, "page_size": 64, "max_batch_tokens": 512, **settings.pop("batching", {})}
    generation = config(**{"max_new_tokens": NEW, **settings})
    with model.continuous_batching_context_manager(
        generation, continuous_batching_config=ContinuousBatchingConfig(**batching), timeout=10
    ) as manager:
        yield manager


def outputs(manager: Any, ids: Iterable[str]) -> dict[str, Any]:
    """The last outputs of these requests, once all are there; those of others are dropped."""
    found: dict[str, Any] = {}
    wanted, deadline = set(ids), time.monotonic() + SECONDS
    while wanted - found.keys():
        assert time.monotonic() < deadline, f"no answer to {sorted(wanted - found.keys())}"
        one = manager.get_result(timeout=0.05)
        if one is not None and one.is_finished():
            found[one.request_id] = one
    return found


def answer(manager: Any, prompt: list[int], **settings: Any) -> list[int]:
    request_id = manager.add_request(prompt, **settings)
    one = outputs(manager, [request_id])[request_id]
    assert one.error is None
    return one.generated_tokens


class Fault:
    """Raises at chosen calls of a function that it stands for."""

    def __init__(self, owner: Any, name: str, at: Iterable[int], error: BaseException):
        self.own, self.at, self.error, self.calls = getattr(owner, name), set(at), error, 0
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls in self.at:
            raise self.error
        return self.own(*args, **kwargs)


def refuse_token(model: PreTrainedModel, token: int, layer: int, error: Exception) -> None:
    """Let every forward that reads `token` fail in a layer, after the layers before it have written."""
    seen = SimpleNamespace(bad=False)

    def look(module: Any, args: Any) -> None:
        seen.bad = bool((args[0] == token).any())

    def fail(module: Any, args: Any) -> None:
        if seen.bad:
            raise error

    model.model.embed_tokens.register_forward_pre_hook(look)
    model.model.layers[layer].mlp.register_forward_pre_hook(fail)


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
    from qattn_hf.continuous.admission import positions_of

    parameters = {"rope_theta": 10000.0, **rope}
    assert positions_of(LlamaConfig(max_position_embeddings=64, rope_parameters=parameters)) == positions


@pytest.mark.parametrize(
    ("settings", "words"),
    [
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
    ],
)
def test_settings_that_no_request_may_have(settings: dict[str, Any], words: str):
    model, (prompt,) = patch(tiny_llama(), "none"), prompts_of(5)
    with running(model) as manager:
        with pytest.raises(QAttnError, match=words):
            manager.add_request(prompt, **settings)
        assert answer(manager, prompt) == alone(model, prompt, max_new_tokens=NEW)


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


@pytest.mark.parametrize(
    ("method", "layer", "error"),
    [
        ("none", 0, KeyError("lost")),
        ("turbo", 1, RuntimeError("broken")),
        ("kivi", 1, torch.OutOfMemoryError("no memory")),
    ],
)
def test_a_forward_that_fails_fails_its_request_alone(method: str, layer: int, error: Exception):
    model, (bad, *good) = tiny_llama(), prompts_of(70, 5, 130)
    patch(model, method)
    right = [alone(model, prompt, max_new_tokens=NEW) for prompt in good]
    refuse_token(model, 90, layer, error)
    bad[40] = 90
    with running(model) as manager:
        ids = manager.add_requests([good[0], bad, good[1]])
        found = outputs(manager, ids)
        assert type(error).__name__ in found[ids[1]].error and found[ids[1]].generated_tokens == []
        assert [found[ids[0]].generated_tokens, found[ids[2]].generated_tokens] == right
        assert manager.failed is None and manager.metrics()["requests_failed"] == 1
        assert manager.metrics()["blocks_used"] == manager.metrics()["requests_running"] == 0


PLACES = {
    "forward": lambda processor: (processor.model_runner, "compute_batch"),
    "inputs": lambda processor: (processor.logit_processor, "prepare_tensor_args"),
    "begin": lambda processor: (processor.cache, "begin"),
    "rows": lambda processor: (processor.cache.allocator, "clear_rows"),
    "update": lambda processor: (processor.cache, "mark_complete_blocks"),
    "output": lambda processor: (processor.inputs_and_outputs, "prepare_batch_update"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_error_that_does_not_come_again_costs_no_token(place: str):
    """At each of four calls; codes of `none` are exact, so that a request that is read again goes on as before."""
    model, prompts = patch(tiny_llama(), "none"), prompts_of(5, 70, 64)
    want = [alone(model, prompt, max_new_tokens=3) for prompt in prompts]
    with running(model, max_new_tokens=3) as manager:
        fault = Fault(*PLACES[place](manager.batch_processor), [], RuntimeError("once"))
        for at in (1, 2, 3, 4):
            with manager.pause():  # so that the first forward has all three
                fault.at = {fault.calls + at}
                ids = manager.add_requests(prompts)
            found = outputs(manager, ids)
            assert [(found[one].error, found[one].generated_tokens) for one in ids] == [(None, one) for one in want]
        assert manager.batch_processor.failures >= 3
        assert manager.metrics()["blocks_used"] == 0 and manager.failed is None


def test_an_error_of_the_scheduler_leaves_a_loop_that_answers():
    model, prompts = patch(tiny_llama(), "turbo"), prompts_of(5, 130)
    with running(model) as manager:
        Fault(manager.batch_processor.scheduler, "schedule_batch", [3], RuntimeError("confused"))
        with manager.pause():
            ids = manager.add_requests(prompts)
        assert all("confused" in one.error for one in outputs(manager, ids).values())
        assert answer(manager, prompts[1]) == alone(model, prompts[1], max_new_tokens=NEW)
        assert manager.metrics()["blocks_used"] == 0


def test_blocks_of_a_forward_that_failed_are_no_prefix_of_others():
    model, (prefix, end) = patch(tiny_llama(), "turbo"), prompts_of(192, 5)
    with running(model) as manager:
        Fault(manager.batch_processor.model_runner, "compute_batch", [1], RuntimeError("once"))
        (first,) = manager.add_requests([prefix + end])
        assert "once" in outputs(manager, [first])[first].error
        assert manager.metrics()["blocks_cached"] == 0
        assert answer(manager, prefix + end) == alone(model, prefix + end, max_new_tokens=NEW)
        assert manager.metrics()["blocks_cached"] > 0


@pytest.mark.parametrize(("name", "at"), [("fork_blocks", 1), ("fork_blocks", 2), ("copy_rows", 1), ("copy_blocks", 1)])
def test_an_error_of_a_fork_costs_no_answer(name: str, at: int):
    """Two prompts, or the request that was forked would fail as one that was alone in its forward."""
    model, prompts = patch(tiny_llama(), "kivi"), prompts_of(75, 40)
    with running(model, do_sample=True, top_k=1, num_return_sequences=3, max_new_tokens=3) as manager:
        fault = Fault(manager.batch_processor.cache.allocator, name, [at], RuntimeError("once"))
        with manager.pause():
            ids = manager.add_requests(prompts)
        right = [alone(model, prompt, max_new_tokens=3) for prompt in prompts]
        assert answers_to(manager, *ids) == [tokens for tokens in right for _ in range(3)]
        assert fault.calls >= at and manager.batch_processor.failures == 1
        assert manager.metrics()["blocks_used"] == 0


def answers_to(manager: Any, *ids: str) -> list[list[int]]:
    """All three answers to each prompt."""
    answers = [one + child for one in ids for child in ("", "__child#0", "__child#1")]
    found = outputs(manager, answers)
    assert [found[one].error for one in answers] == [None] * len(answers)
    return [found[one].generated_tokens for one in answers]


def test_a_fork_that_fails_alone_fails_all_its_answers():
    model, (prompt,) = patch(tiny_llama(), "none"), prompts_of(75)
    with running(model, do_sample=True, top_k=1, num_return_sequences=3) as manager:
        Fault(manager.batch_processor.cache.allocator, "fork_blocks", [2], RuntimeError("once"))
        (first,) = manager.add_requests([prompt])
        found = outputs(manager, [first, f"{first}__child#0", f"{first}__child#1"])
        assert all("once" in one.error for one in found.values())
        assert manager.metrics()["blocks_used"] == 0 and manager.failed is None


@pytest.mark.parametrize("method", ["none", "turbo"])
def test_a_prompt_of_one_token_has_several_answers(method: str):
    """A fork needs a token in front of it; of a prompt whose whole blocks are shared one may be left too."""
    model, (long, short) = patch(tiny_llama(), method), prompts_of(129, 1)
    with running(model, do_sample=True, top_k=1, num_return_sequences=3) as manager:
        for prompt in (short, long, long, short):
            (first,) = manager.add_requests([prompt])
            assert answers_to(manager, first) == [alone(model, prompt, max_new_tokens=NEW)] * 3


def test_a_call_of_no_tokens_is_left_out():
    from qattn_hf.continuous.resolve import layouts

    specs = [layouts(patch(tiny_llama(), "turbo"))[0].spec]
    idle, busy = Held(0, 0, 0, [], True), Held(1, 0, 5, [1], True)
    calls = batches([idle, busy, idle], specs, torch.device("cpu"), 2)
    assert [call.columns.tolist() for call in calls] == [[[0, 1, 2, 3, 4]]]
    assert batches([idle], specs, torch.device("cpu"), 2) == []


def test_requests_are_cancelled_at_any_time():
    model, prompts = patch(tiny_llama(), "turbo"), prompts_of(5, 130, 64, 90)
    with running(model, batching={"max_requests_per_batch": 2}) as manager:
        manager.cancel_request("nobody")
        ids = [manager.add_request(prompt, max_new_tokens=40) for prompt in prompts]
        for request_id in (ids[0], ids[0], ids[2]):  # one that runs, twice; one that waits for a row
            manager.cancel_request(request_id)
        found = outputs(manager, [ids[1], ids[3]])
        manager.cancel_request(ids[1])
        for request_id, prompt in ((ids[1], prompts[1]), (ids[3], prompts[3])):
            assert found[request_id].generated_tokens == alone(model, prompt, max_new_tokens=40)
        with pytest.raises(QAttnError, match="a text"):
            manager.cancel_request([1])  # type: ignore[arg-type]
        assert answer(manager, prompts[0]) == alone(model, prompts[0], max_new_tokens=NEW)
        assert manager.metrics()["blocks_used"] == 0 and manager.metrics()["requests_cancelled"] == 2


def test_a_request_that_gave_its_blocks_back_does_not_wait_for_a_cancelled_one():
    model, (first, second) = patch(tiny_llama(), "none"), prompts_of(60, 59)
    with running(model, blocks=2, max_new_tokens=60) as manager:
        scheduler = manager.batch_processor.scheduler
        own, cancelled = scheduler.add_waiting_request, []

        def once(state: Any) -> None:
            own(state)
            if len(state.initial_tokens) > 60 and not cancelled:  # the one that gave its blocks back
                cancelled.extend({"first", "second"} - {state.request_id})
                manager.cancel_request(cancelled[0])

        scheduler.add_waiting_request = once
        with manager.pause():
            manager.add_request(first, request_id="first")
            manager.add_request(second, request_id="second")
        assert outputs(manager, ["first"])["first"].generated_tokens == alone(model, first, max_new_tokens=60)
        assert cancelled == ["second"]


def test_two_requests_that_each_fill_the_pool_both_end():
    model, prompts = patch(tiny_llama(), "none"), prompts_of(60, 50)
    got = batched(model, prompts, blocks=2, max_new_tokens=68)
    assert got == [alone(model, prompt, max_new_tokens=68) for prompt in prompts]


def test_a_loop_that_ended_says_so_and_starts_again():
    from qattn_hf.continuous.admission import EngineError

    model, prompts = patch(tiny_llama(), "turbo"), prompts_of(5, 130)
    with running(model) as manager:
        fault = Fault(manager.batch_processor.model_runner, "compute_batch", [3], SystemExit("gone"))
        ids = manager.add_requests(prompts)
        assert all("SystemExit" in one.error for one in outputs(manager, ids).values())
        manager._generation_thread.join(SECONDS)
        assert isinstance(manager.failed, EngineError) and not manager.is_running()
        with pytest.raises(EngineError, match="Start the manager again"):
            manager.add_request(prompts[0])
        assert fault.calls == 3
        manager.start()
        assert manager.failed is None
        assert answer(manager, prompts[1]) == alone(model, prompts[1], max_new_tokens=NEW)
        assert manager.metrics()["blocks_used"] == 0


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("method", ["turbo", "kivi"])
def test_kernels_outlive_a_forward_that_fails(method: str):
    """One that runs out of memory, among seeded draws, whose tokens are those of requests alone."""
    model, prompts = tiny_llama(head_dim=64, num_hidden_layers=1).to(DEVICE), prompts_of(5, 63)
    patch(model, method, impl="triton")
    wishes = [{"seed": seed, "do_sample": True, "top_p": 0.9} for seed in range(2)]
    with running(model, max_new_tokens=2) as manager:
        right = [answer(manager, prompt, **wish) for prompt, wish in zip(prompts, wishes, strict=True)]
        refuse_token(model, 90, 0, torch.OutOfMemoryError("no memory"))
        bad = manager.add_request([1] * 10 + [90])
        ids = [manager.add_request(prompt, **wish) for prompt, wish in zip(prompts, wishes, strict=True)]
        found = outputs(manager, [bad, *ids])
        assert "OutOfMemoryError" in found[bad].error
        assert [found[one].generated_tokens for one in ids] == right


def test_a_manager_that_is_kept_serves_again():
    model, (prompt,) = patch(tiny_llama(), "none"), prompts_of(70)
    for _ in range(2):
        made = model.generate_batch([prompt, []], config(max_new_tokens=NEW), persistent_manager=True)
        good, bad = made.values()
        assert good.generated_tokens == alone(model, prompt, max_new_tokens=NEW) and "empty" in bad.error
    model.destroy_cached_continuous_batching_manager()


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
    from qattn_hf.continuous.sampling import Sampling, warp

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
    from qattn_hf.continuous.sampling import Draw, Sampling, choose

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
    from qattn_hf.continuous.sampling import Draw, Sampling, choose

    scores = torch.randn(3, 97, generator=torch.Generator().manual_seed(0))
    seeded = [Draw(Sampling(True, seed=5, top_p=0.9), "one", 7)] * 3
    want, _ = choose(scores, seeded, logprobs=False)
    scores[1] = torch.nan
    got, _ = choose(scores, seeded, logprobs=False)
    assert (got[0], got[2]) == (want[0], want[2])


def test_a_handler_that_fails_or_is_gone_stops_no_other():
    model, prompts = patch(tiny_llama(), "none"), prompts_of(5, 33, 64)
    gone, got = asyncio.new_event_loop(), {}

    async def ask(manager: Any) -> None:
        async def there() -> None:
            manager.register_result_handler("gone", print)

        done = asyncio.Event()

        def take(output: Any) -> None:
            got["good"] = output
            if output.is_finished():
                done.set()

        def fail(output: Any) -> None:
            raise RuntimeError("the client is gone")

        manager.register_result_handler("good", take)
        manager.register_result_handler("bad", fail)
        await asyncio.get_running_loop().run_in_executor(None, gone.run_until_complete, there())
        gone.close()
        for request_id, prompt in zip(("gone", "bad", "good"), prompts, strict=True):
            manager.add_request(prompt, request_id=request_id, streaming=True, max_new_tokens=100)
        await asyncio.wait_for(done.wait(), SECONDS)

    with running(model) as manager:
        asyncio.run(ask(manager))
        assert got["good"].generated_tokens == alone(model, prompts[2], max_new_tokens=100)
        assert manager.failed is None and manager.metrics()["requests_cancelled"] == 2
        assert manager.output_router.result_handlers == {}


def test_a_cancelled_request_tells_its_handler():
    model, (prompt,) = patch(tiny_llama(), "none"), prompts_of(5)

    async def ask(manager: Any) -> Any:
        last = asyncio.get_running_loop().create_future()

        def take(output: Any) -> None:
            if output.is_finished():
                last.set_result(output)
            elif len(output.generated_tokens) == 3:
                manager.cancel_request("mine")

        manager.register_result_handler("mine", take)
        manager.add_request(prompt, request_id="mine", streaming=True, max_new_tokens=900)
        return await asyncio.wait_for(last, SECONDS)

    with running(model) as manager:
        output = asyncio.run(ask(manager))
    assert output.error == "cancelled" and 3 <= len(output.generated_tokens) < 900


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
    from qattn_hf.continuous.pool import HOST_BYTES, bound_on_host
    from qattn_hf.continuous.resolve import layouts

    model = patch(tiny_llama(head_dim=128, num_hidden_layers=8, num_key_value_heads=4), "none")
    given = SimpleNamespace(max_requests_per_batch=1024, num_blocks=None)
    bound_on_host(layouts(model), given)
    per_token = 8 * 2 * 4 * 128 * 4  # layers, keys and values, heads, dims, bytes of float32
    assert 0.7 * HOST_BYTES < given.num_blocks * 64 * per_token < HOST_BYTES or given.num_blocks * 64 == 32768
    assert given.max_requests_per_batch <= given.num_blocks


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
