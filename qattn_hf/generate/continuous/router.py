"""Outputs of requests on their way to the callers, of which none can hold up another."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from qattn_hf.generate.continuous.admission import RequestError
from qattn_hf.generate.continuous.sampling import CHILD
from qattn_hf.generate.continuous.transformers_api import GenerationOutput, OutputRouter, RequestStatus
from qattn_hf.messages import shown

log = logging.getLogger(__name__)
CANCELLED = "cancelled"


class Router(OutputRouter):
    """An `OutputRouter` that gives every request one last output, and outlives handlers that fail.

    Args:
        cancel: is told the id of a request whose handler is gone.

    Attributes:
        live: ids of requests that have had no last output; of a prompt with several answers, one id each.
        counts: requests that ended, by `requests_finished`, `requests_failed` and `requests_cancelled`.
    """

    def __init__(self, cancel: Callable[[str], None]):
        super().__init__()
        self.cancel = cancel
        self.live: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._ends = threading.Lock()

    def begin(self, request_ids: list[str]) -> None:
        """Expect a last output of each of these.

        Raises:
            RequestError: one of them is expected already.
        """
        with self._ends:
            used = self.live.intersection(request_ids)
            if used:
                raise RequestError(
                    f"request id {shown(min(used))} is in use: give each request an id of its own, or none"
                )
            self.live.update(request_ids)

    def deliver(self, output: Any) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Callable[[Any], None], Any]]] = {}
        for output in outputs:
            if output.is_finished() and not self._end(output):
                continue  # which has had its last output
            with self._lock:
                entry = self.result_handlers.get(output.request_id)
            if entry is None:
                self.output_queue.put(output)
            else:
                by_loop.setdefault(entry[1], []).append((entry[0], output))
        for loop, calls in by_loop.items():
            try:
                loop.call_soon_threadsafe(self._call, calls)
            except RuntimeError:  # a loop that is closed
                self._gone({output.request_id for _, output in calls})

    def _end(self, output: Any) -> bool:
        """Note the last output of a request; False where it has had one."""
        with self._ends:
            if output.request_id not in self.live:
                return False
            self.live.remove(output.request_id)
            failed = output.status == RequestStatus.FAILED
            self.counts["requests_failed" if failed else "requests_finished"] += 1
            return True

    def _call(self, calls: list[tuple[Callable[[Any], None], Any]]) -> None:
        """Hand outputs to their handlers, in the handlers' event loop."""
        for handler, output in calls:
            try:
                handler(output)
            except Exception:  # a caller's handler may raise anything, which must not end other requests
                log.exception("the handler of request %s failed: the request is cancelled", output.request_id)
                self._gone({output.request_id})

    def _gone(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.drop_handler(request_id)
            self.cancel(request_id)

    def drop_handler(self, request_id: str) -> None:
        """Forget the handler of a request."""
        with self._lock:
            self.result_handlers.pop(request_id, None)

    def forget(self, request_ids: list[str]) -> None:
        """Expect no output of these, which no caller was promised."""
        with self._ends:
            self.live.difference_update(request_ids)

    def answers(self, request_id: str) -> set[str]:
        """The ids of a request's answers that have had no last output: its own, and those that transformers forks."""
        with self._ends:
            return {one for one in self.live if one == request_id or one.startswith(request_id + CHILD)}

    def fail(self, request_ids: Iterable[str], error: str, prompt: list[int] | None = None) -> None:
        """Give requests without tokens a last output that says what failed."""
        for one in request_ids:
            self.deliver(
                GenerationOutput(request_id=one, prompt_ids=prompt or [], error=error, status=RequestStatus.FAILED)
            )

    def cancelled(self, state: Any) -> None:
        """Note that a request was cancelled: its handler gets a last output, the queue of all others none."""
        with self._ends:
            if state.request_id not in self.live:
                return
            self.live.remove(state.request_id)
            self.counts["requests_cancelled"] += 1
        with self._lock:
            entry = self.result_handlers.get(state.request_id)
        if entry is not None:
            output = state.to_generation_output()
            output.status, output.error = RequestStatus.FAILED, CANCELLED
            try:
                entry[1].call_soon_threadsafe(self._call, [(entry[0], output)])
            except RuntimeError:
                self.drop_handler(state.request_id)
