"""Deliver outputs of requests to callers. A slow or failing caller does not hold up the others."""

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
    """An `OutputRouter` that gives every request exactly one last output and survives failing handlers.

    Args:
        cancel: called with the id of a request whose handler is gone.

    Attributes:
        live: ids of requests without a last output yet; a prompt with several answers has one id per answer.
        counts: ended requests by outcome: `requests_finished`, `requests_failed`, `requests_cancelled`.
    """

    def __init__(self, cancel: Callable[[str], None]):
        super().__init__()
        self.cancel = cancel
        self.live: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._ends = threading.Lock()

    def begin(self, request_ids: list[str]) -> None:
        """Expect a last output of each request.

        Raises:
            RequestError: an id is in use already.
        """
        with self._ends:
            used = self.live.intersection(request_ids)
            if used:
                raise RequestError(
                    f"request id {shown(min(used))} is in use: give each request a different id, or none"
                )
            self.live.update(request_ids)

    def deliver(self, output: Any) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Callable[[Any], None], Any]]] = {}
        for output in outputs:
            if output.is_finished() and not self._end(output):
                continue  # the last output was already delivered
            with self._lock:
                entry = self.result_handlers.get(output.request_id)
            if entry is None:
                self.output_queue.put(output)
            else:
                by_loop.setdefault(entry[1], []).append((entry[0], output))
        for loop, calls in by_loop.items():
            try:
                loop.call_soon_threadsafe(self._call, calls)
            except RuntimeError:  # the handler's event loop is closed
                self._gone({output.request_id for _, output in calls})

    def _end(self, output: Any) -> bool:
        """Record the last output of a request. Return False if it already had one."""
        with self._ends:
            if output.request_id not in self.live:
                return False
            self.live.remove(output.request_id)
            failed = output.status == RequestStatus.FAILED
            self.counts["requests_failed" if failed else "requests_finished"] += 1
            return True

    def _call(self, calls: list[tuple[Callable[[Any], None], Any]]) -> None:
        """Pass outputs to their handlers, in the handlers' event loop."""
        for handler, output in calls:
            try:
                handler(output)
            except Exception:  # a caller's handler may raise anything; other requests must go on
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
        """Stop expecting outputs of requests that no caller knows of."""
        with self._ends:
            self.live.difference_update(request_ids)

    def answers(self, request_id: str) -> set[str]:
        """Return the ids of a request's answers without a last output: the request's id and the forked ids."""
        with self._ends:
            return {one for one in self.live if one == request_id or one.startswith(request_id + CHILD)}

    def fail(self, request_ids: Iterable[str], error: str, prompt: list[int] | None = None) -> None:
        """Give requests a last output without tokens that carries the error."""
        for one in request_ids:
            self.deliver(
                GenerationOutput(request_id=one, prompt_ids=prompt or [], error=error, status=RequestStatus.FAILED)
            )

    def cancelled(self, state: Any) -> None:
        """Record a cancelled request: its handler gets a last output, the shared queue gets none."""
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
