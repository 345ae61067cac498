"""Transformers' processor and schedulers of continuous batching, with failures confined to their request."""

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
LONGEST_ERROR = 500  # longest error text in an output, in characters


class Guarded:
    """Mixin for Transformers' schedulers: serve suspects one at a time, and never wait without active requests.

    Attributes:
        suspects: ids of the requests of a failed forward. Each of the next forwards runs one of them alone.
        told: callback that gets the state of each cancelled request.
        live: ids of the requests without a last output yet.
    """

    def reset(self: Any) -> None:
        super().reset()  # type: ignore[misc]
        self.suspects: set[str] = set()

    def schedule_batch(self: Any, *budgets: int) -> Any:
        if not self.active_requests:  # no active request can end and unblock the waiting ones
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
        """Fork a request with one token left before its forward; otherwise the forward would have no token of it."""
        if state.num_children and len(request_tokens) == 1:
            children, state.num_children = state.num_children, 0
            for index in range(children):
                self.add_waiting_request(again(state, f"{state.request_id}{CHILD}{index}"))
        part = self.cache.until_part(state)
        if part is not None and state.status <= RequestStatus.PREFILLING:
            budget = min(budget, part)  # end the call where the kept prefix ends
        super()._schedule_request(state, request_tokens, budget, *args)  # type: ignore[misc]

    def clear_cancelled_requests(self: Any) -> list[Any]:
        cancels = self._requests_to_cancel
        states: list[Any] = super().clear_cancelled_requests()  # type: ignore[misc]
        for state in states:
            self.told(state)
        with self._cancellation_lock:  # a cancel may come before its request was taken from the queue of new ones
            self._requests_to_cancel |= cancels & self.live
        return states


SCHEDULERS = {name: type(name, (Guarded, one), {}) for name, one in SCHEDULER_MAPPING.items()}


class PackedProcessor(ContinuousBatchProcessor):
    """A `ContinuousBatchProcessor` that tells its cache the requests of each forward and survives failed forwards.

    Attributes:
        serving: Transformers' `FutureRequestState`s of the running forward.
        failures: number of failed forwards.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.serving: list[Any] = []
        self.failures = 0
        self.scheduler.told, self.scheduler.live = self._cancelled, self.output_router.live
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
        """Choose tokens by each request's settings. Replaces `ModelRunner._sample`, which uses one setting for all."""
        states = [one.state for one in self.inputs_and_outputs.requests_in_batch if one.has_new_token]
        draws = [Draw(one.logit_processor_kwargs["sampling"], one.request_id, one.position_offset) for one in states]
        tokens, logprobs = choose(scores[0], draws, self.return_logprobs)
        output_ids[0, : len(tokens)].copy_(tokens)
        if logprobs is not None:
            output_ids[1, : len(tokens)].copy_(logprobs.view(torch.int32))

    def recover(self, error: Exception) -> None:
        """Restore scheduler and pool after an error in the loop.

        The requests of a failed forward are read again, one at a time. A request that fails alone has failed. An error
        outside a forward fails the active requests, or the waiting ones if none is active.

        Raises:
            RuntimeError: the device has failed.
            Exception: `error` itself, if there are no requests to fail: it would occur again at once.
        """
        self.failures += 1
        log.error("a forward of continuous batching failed", exc_info=error)
        traceback.clear_frames(error.__traceback__)  # the frames hold the activations
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
        """Release what a request holds. Pages that a failed forward may have written are not offered for prefix
        sharing."""
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
        """Return the ids of a request's answers that are not forked yet."""
        known = {state.request_id, *self.scheduler.active_requests, *self.scheduler.waiting_requests}
        return sorted(self.output_router.answers(state.request_id) - known)

    def _cancelled(self, state: Any) -> None:
        unborn = self._unborn(state)
        self.scheduler.suspects.discard(state.request_id)
        self.output_router.cancelled(state)
        for request_id in unborn:
            self.output_router.cancelled(again(state, request_id))


def again(state: Any, request_id: str) -> Any:
    """Return a request that continues `state`, with all its tokens read as a prompt. Under another id it is not forked
    again."""
    found = state.create_equivalent_initial_request()
    found.created_time = state.created_time
    if request_id != state.request_id:
        found.request_id, found.num_children = request_id, 0
    return found
