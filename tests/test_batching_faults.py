"""Continuous batching: whatever becomes of one request, the others get what `generate` gives them alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from batching import NEW, SECONDS, Fault, answer, break_token, outputs, refuse_token, running
from helpers import DEVICE, make_layer, tiny_llama
from small_types import tiny
from test_continuous_batching import alone, batched, needs_pages, prompts_of

from qattn_hf import patch
from qattn_hf.errors import QAttnError
from qattn_hf.generate.continuous.batch import Held, batches

pytestmark = needs_pages


@pytest.mark.parametrize(
    ("model_type", "method", "layer", "error"),
    [
        ("llama", "none", 0, KeyError("lost")),
        ("llama", "turbo", 1, RuntimeError("broken")),
        ("llama", "kivi", 1, torch.OutOfMemoryError("no memory")),
        ("gemma3_text", "none", 1, RuntimeError("broken")),
        ("gemma3_text", "turbo:sliding=packed", 1, RuntimeError("broken")),
    ],
)
def test_a_forward_that_fails_fails_its_request_alone(model_type: str, method: str, layer: int, error: Exception):
    model = tiny_llama() if model_type == "llama" else tiny(model_type)
    bad, *good = prompts_of(70, 5, 300)  # the last is longer than the ring of a window of 20 tokens
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
    model, (prefix, end) = patch(tiny_llama(), "turbo:sink_num=0"), prompts_of(192, 5)
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
    window = make_layer(("turbo", {})).spec.window
    idle, busy = Held(0, 0, 0, [], True), Held(1, 0, 5, [1], True)
    calls = batches([idle, busy, idle], window, torch.device("cpu"), 2)
    assert [call.columns.tolist() for call in calls] == [[[0, 1, 2, 3, 4]]]
    assert batches([idle], window, torch.device("cpu"), 2) == []


@pytest.mark.slow
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


def test_a_cancel_that_is_read_before_its_request():
    """Transformers takes new requests from their queue first, then cancels: a request may arrive in between."""
    model, (prompt,) = patch(tiny_llama(), "none"), prompts_of(20)
    with running(model, max_new_tokens=400) as manager:
        scheduler = manager.batch_processor.scheduler
        own = scheduler.add_waiting_request

        def late(state: Any) -> None:
            scheduler.set_request_cancellation(state.request_id)
            scheduler.clear_cancelled_requests()
            scheduler.add_waiting_request = own
            own(state)

        scheduler.add_waiting_request = late
        manager.add_request(prompt)
        assert answer(manager, prompt, max_new_tokens=NEW) == alone(model, prompt, max_new_tokens=NEW)
        assert manager.metrics()["requests_cancelled"] == 1


def test_two_requests_that_each_fill_the_pool_both_end():
    model, prompts = patch(tiny_llama(), "none"), prompts_of(60, 50)
    got = batched(model, prompts, blocks=2, max_new_tokens=30)
    assert got == [alone(model, prompt, max_new_tokens=30) for prompt in prompts]


def test_a_loop_that_ended_says_so_and_starts_again():
    from qattn_hf.generate.continuous.admission import EngineError

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
@pytest.mark.parametrize("method", ["turbo", pytest.param("kivi", marks=pytest.mark.exhaustive)])
def test_kernels_outlive_a_forward_that_fails(method: str):
    """A forward that runs out of memory does not change the tokens of seeded draws, which equal those of single
    requests."""
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


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["int8", pytest.param("kivi", marks=pytest.mark.slow)])
def test_kernels_hide_no_token_for_the_sake_of_an_earlier_request(method: str):
    """Masks of tokens that were not finite lie in pages, where steps of the next request begin a block. Of its prompt
    one token is seen, so that its answer depends on the tokens of the block."""
    model = tiny_llama(head_dim=64, num_hidden_layers=1).to(DEVICE)
    break_token(model, 90)
    patch(model, method, impl="triton")
    prompt, short = [1, *[90] * 62], {"max_new_tokens": 6}
    with running(model, blocks=2, **short) as manager:
        answer(manager, [2, *[90] * 99], max_new_tokens=1)
        assert answer(manager, prompt) == alone(model, prompt, **short)


def test_masks_leave_a_page_when_it_comes_back_to_the_pool():
    """Not while it is a prefix of others; also after a forward that failed, and where the pool is emptied."""
    model, (prompt,) = patch(tiny_llama(), "int8"), prompts_of(130)
    with running(model, blocks=3) as manager:
        cache = manager.batch_processor.cache
        allocator = cache.allocator

        def masked(*, set_all: bool) -> list[int]:
            """Pages with masks in every layer, once the next forward began; before it, all have them."""
            bits = [layer.pages["dropped"] for layer in allocator.layers.values()]
            if set_all:
                for one in bits:
                    one.fill_(255)
            allocator.clear_rows()
            found = [one.ne(0).any(3).any(1)[0].nonzero().flatten().tolist() for one in bits]
            assert all(one == found[0] for one in found)
            return found[0]

        def free(pages: list[int]) -> list[int]:
            return [page for page in pages if page > 0]  # the first is nobody's

        answer(manager, prompt)
        with manager.pause():
            assert len(free(masked(set_all=True))) == 2 == manager.metrics()["blocks_cached"]
            assert cache.evict_cached_blocks()
            assert free(masked(set_all=False)) == []
        Fault(manager.batch_processor.model_runner, "compute_batch", [1], RuntimeError("once"))
        (failed,) = manager.add_requests([prompt])
        assert "once" in outputs(manager, [failed])[failed].error
        with manager.pause():
            assert free(masked(set_all=True)) == []
        answer(manager, prompt)
        with manager.pause():
            cache.reset()
            assert free(masked(set_all=True)) == []


def test_a_copy_of_a_page_keeps_its_masks():
    """Into a page that came back to the pool and was cleared by no forward since."""
    with running(patch(tiny_llama(), "int8")) as manager, manager.pause():
        allocator = manager.batch_processor.cache.allocator
        first = allocator.blocks_per_sector + 1
        for layer in allocator.layers.values():
            layer.pages["dropped"][:, :, 1] = 5
        allocator.returned = {first + 1}
        allocator.copy_blocks([first], [first + 1])
        allocator.clear_rows()
        for layer in allocator.layers.values():
            assert (layer.pages["dropped"][:, :, 2] == 5).all()


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


@pytest.mark.slow
def test_prefixes_with_sinks_stay_right_after_faults():
    """Faults: a forward that fails between sharers, a cancelled sharer, a prefix that cannot be kept, and a pool that
    reclaims kept blocks."""
    model, (prefix, *ends) = patch(tiny_llama(), "turbo"), prompts_of(128, 5, 6, 7, 8)
    prompts = [prefix + end for end in ends]
    own = alone(model, prompts[0], max_new_tokens=NEW)
    want = [alone(model, prompt, first=128, max_new_tokens=NEW) for prompt in prompts]
    with running(model) as manager:
        allocator = manager.batch_processor.cache.allocator
        fault = Fault(next(iter(allocator.layers.values())), "keep_row", [1], torch.OutOfMemoryError("no memory"))
        assert answer(manager, prompts[0]) == own  # and is not kept
        assert allocator.prefixes.kept == {} and manager.metrics()["blocks_cached"] == 0
        assert [answer(manager, prompts[1]), answer(manager, prompts[0])] == [want[1], want[0]] and fault.calls == 2
        Fault(manager.batch_processor.model_runner, "compute_batch", [1], RuntimeError("once"))
        with manager.pause():
            ids = manager.add_requests(prompts[1:])
        manager.cancel_request(ids[0])
        found = outputs(manager, ids[1:])
        assert [found[one].generated_tokens for one in ids[1:]] == want[2:]
        assert answer(manager, prompts[0]) == want[0]
        assert manager.metrics()["blocks_used"] == 0 and manager.metrics()["blocks_cached"] == 2
        with manager.pause():
            assert manager.batch_processor.cache.evict_cached_blocks()
        assert manager.metrics()["blocks_cached"] == 0
        assert answer(manager, prompts[0]) in (own, want[0])
        manager.batch_processor.cache.reset()
        assert allocator.prefixes.kept == {}
