"""transformers' processor and schedulers of continuous batching, where a failure stays with its request."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch

from qattn_hf.generate.continuous.sampling import CHILD, Draw, choose
from qattn_hf.generate.continuous.transformers_api import SCHEDULER_MAPPING, ContinuousBatchProcessor, RequestStatus
from qattn_hf.messages import cut

log = logging.getLogger(__name__)
LONGEST_ERROR = 500  # characters of an error that an output repeats


class Guarded:
    """What a scheduler of transformers gets: it serves suspects one at a time, and never waits for nobody.

    Attributes:
        suspects: ids of requests of a forward that failed. The next forward has one of them alone.
        told: is given the state of each request that was cancelled.
    """

    def reset(self: Any) -> None:
        super().reset()  # type: ignore[misc]
        self.suspects: set[str] = set()

    def schedule_batch(self: Any, *budgets: int) -> Any:
        if not self.active_requests:  # new ones wait for one that ends, and none is left to end
            self.block_new_requests = False
        return super().schedule_batch(*budgets)  # type: ignore[misc]

    def _process_candidates(self: Any, candidates: list[Any], *args: Any) -> Any:
        suspects = [state for state in candidates if state.request_id in self.suspects]
        if suspects:
            found = super()._process_candidates(suspects[:1], *args)  # type: ignore[misc]
            candidates = [state for state in candidates if state.request_id not in self.suspects]
            if found[0] or not candidates:
                return found
        return super()._process_candidates(candidates, *args)  # type: ignore[misc]

    def _schedule_request(self: Any, state: Any, request_tokens: list[int], budget: int, *args: Any) -> None:
        """A request with one token left is forked before its forward, which would else have no token of it."""
        if state.num_children and len(request_tokens) == 1:
            children, state.num_children = state.num_children, 0
            for index in range(children):
                self.add_waiting_request(again(state, f"{state.request_id}{CHILD}{index}"))
        part = self.cache.until_part(state)
        if part is not None and state.status <= RequestStatus.PREFILLING:
            budget = min(budget, part)  # the prefix is kept at the end of a call
        super()._schedule_request(state, request_tokens, budget, *args)  # type: ignore[misc]

    def clear_cancelled_requests(self: Any) -> list[Any]:
        states: list[Any] = super().clear_cancelled_requests()  # type: ignore[misc]
        for state in states:
            self.told(state)
        return states


SCHEDULERS = {name: type(name, (Guarded, one), {}) for name, one in SCHEDULER_MAPPING.items()}


class PackedProcessor(ContinuousBatchProcessor):
    """A `ContinuousBatchProcessor` that tells its cache what each forward serves, and outlives forwards that fail.

    Attributes:
        serving: transformers' `FutureRequestState`s of the forward that runs. failures: forwards that failed.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.serving: list[Any] = []
        self.failures = 0
        self.scheduler.told = self._cancelled
        self.model_runner._sample = self._sample
        prepare = self.inputs_and_outputs.prepare_batch_tensors

        def noted(requests_in_batch: Any, *args: Any, **kwargs: Any) -> None:
            self.serving = list(requests_in_batch)
            self.cache.begin(self.serving)
            prepare(self.serving, *args, **kwargs)

        self.inputs_and_outputs.prepare_batch_tensors = noted

    def update_batch(self) -> None:
        super().update_batch()
        stream = self.inputs_and_outputs.compute_stream
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            self.cache.allocator.keep_rows()
        self.scheduler.suspects.difference_update(one.state.request_id for one in self.serving if one.has_new_token)
        self.serving = []

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Choose tokens, in place of `ModelRunner._sample`, which has one way for all requests."""
        states = [one.state for one in self.inputs_and_outputs.requests_in_batch if one.has_new_token]
        draws = [Draw(one.logit_processor_kwargs["sampling"], one.request_id, one.position_offset) for one in states]
        tokens, logprobs = choose(scores[0], draws, self.return_logprobs)
        output_ids[0, : len(tokens)].copy_(tokens)
        if logprobs is not None:
            output_ids[1, : len(tokens)].copy_(logprobs.view(torch.int32))

    def recover(self, error: Exception) -> None:
        """Put scheduler and pool in order after an error of the loop.

        The requests of a forward that failed are read again, one at a time; one that fails alone has failed. An error
        outside a forward belongs to no request: then the active ones fail, or the waiting ones where none is active.

        Raises:
            RuntimeError: the device does not answer any more.
            Exception: `error`, which would come again at once, since it met no request.
        """
        self.failures += 1
        log.error("a forward of continuous batching failed", exc_info=error)
        traceback.clear_frames(error.__traceback__)  # which hold the activations
        if self.model_device.type == "cuda":
            torch.cuda.synchronize(self.model_device)
            torch.cuda.empty_cache()
        scheduler = self.scheduler
        states = [one.state for one in self.serving]
        read_again, self.serving = len(states) > 1, []
        states = states or list(scheduler.active_requests.values()) or list(scheduler.waiting_requests.values())
        for request_id in self.cache.allocator.unfinished_forks():
            child = scheduler.active_requests.get(request_id)
            states += [] if child is None else [child]
            self.cache.free_blocks(request_id, no_cache=True)
        scheduler._requests_to_fork.clear()
        if not states:
            raise error
        for state in states:
            self._take_out(state)
            if state.status == RequestStatus.FINISHED:
                self.output_router.deliver(state.to_generation_output())
            elif read_again:
                self._try_alone(state)
            else:
                self._fail(state, error)

    def _take_out(self, state: Any) -> None:
        """Give back what a request holds; pages that a failed forward may have touched are offered to nobody."""
        scheduler, request_id = self.scheduler, state.request_id
        self.cache.free_blocks(request_id, no_cache=True)
        scheduler.active_requests.pop(request_id, None)
        if scheduler.waiting_requests.pop(request_id, None) is not None:
            scheduler.waiting_requests_order.remove(request_id)

    def _try_alone(self, state: Any) -> None:
        ids = {state.request_id} if state.num_children else {state.request_id, *self._unborn(state)}
        for request_id in sorted(ids):
            self.scheduler.add_waiting_request(again(state, request_id))
        self.scheduler.suspects |= ids

    def _fail(self, state: Any, error: Exception) -> None:
        text = cut(f"the forward of this request failed: {type(error).__name__}: {error}", LONGEST_ERROR)
        self.scheduler.suspects.discard(state.request_id)
        unborn = self._unborn(state)
        self.output_router.fail_and_deliver(state, RuntimeError(text))
        self.output_router.fail(unborn, text, state.initial_tokens)

    def _unborn(self, state: Any) -> Iterable[str]:
        """Answers that a request would have been forked for."""
        known = {state.request_id, *self.scheduler.active_requests, *self.scheduler.waiting_requests}
        return sorted(self.output_router.answers(state.request_id) - known)

    def _cancelled(self, state: Any) -> None:
        unborn = self._unborn(state)
        self.scheduler.suspects.discard(state.request_id)
        self.output_router.cancelled(state)
        for request_id in unborn:
            self.output_router.cancelled(again(state, request_id))


def again(state: Any, request_id: str) -> Any:
    """A request that goes on where `state` is, read as a prompt; under another id, one that is forked no further."""
    found = state.create_equivalent_initial_request()
    found.created_time = state.created_time
    if request_id != state.request_id:
        found.request_id, found.num_children = request_id, 0
    return found
