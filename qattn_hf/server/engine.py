"""What makes the tokens of requests: a worker thread, and a stream of tokens for each request.

`Batching` serves requests together, `OneByOne` in turn. Their methods are called on the event loop; workers hand tokens
over to the streams.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

from qattn_hf.generate.continuous.admission import Limits
from qattn_hf.server.refusals import Refused

MOST = 256  # requests that a server holds, those that wait included
RESTARTS = 3  # of a worker, without an answer in between: then it will not get well


class Stream:
    """The tokens of one request, which the event loop reads while a worker makes them.

    Attributes:
        name: of the request. ids: its prompt. new: the most tokens of its answer.
        sampling: how these are chosen (`sampling_of`). bits: of a value in its packed cache, once known.
    """

    def __init__(self, name: str, ids: list[int], new: int, sampling: dict[str, Any]):
        self.name, self.ids, self.new, self.sampling = name, ids, new, sampling
        self.bits: float | None = None
        self.cancelled = False
        self._queue: asyncio.Queue[list[int] | Exception | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def push(self, item: list[int] | Exception | None) -> None:
        """Add new tokens, an error that ends the stream, or None as its end; on the event loop."""
        self._queue.put_nowait(item)

    def push_from_worker(self, item: list[int] | Exception | None) -> None:
        """As `push`, from another thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.push, item)

    async def __aiter__(self) -> AsyncIterator[list[int]]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item


class Engine(ABC):
    """A worker and the streams that it fills.

    Attributes:
        limits: what a request may ask for; since `start`.
        running: streams that have not ended, by name. lost: what ended a worker that cannot be started again.
        most: streams that may run or wait at once.
    """

    limits: Limits
    most: int = MOST

    def __init__(self) -> None:
        self.running: dict[str, Stream] = {}
        self._names = itertools.count()
        self._deaths = 0
        self.lost: BaseException | None = None

    @abstractmethod
    def start(self) -> str:
        """Make what the worker needs, start it, and return a line that says what there is.

        Raises:
            QAttnError: the model cannot be served so.
        """

    @abstractmethod
    def stop(self) -> bool:
        """End the worker; False where it is still in the middle of a step."""

    @abstractmethod
    def died(self) -> BaseException | None:
        """What ended the worker, if it was not stopped."""

    @abstractmethod
    def restart(self) -> None:
        """Start a dead worker again."""

    @abstractmethod
    def figures(self) -> dict[str, int]:
        """Blocks, bytes and requests, of those that there are (`metrics.GAUGES`)."""

    @abstractmethod
    def _submit(self, stream: Stream) -> None:
        """Hand a stream to the worker."""

    @abstractmethod
    def _cancel(self, stream: Stream) -> None:
        """Tell the worker that nobody reads this stream any more."""

    def submit(self, ids: list[int], new: int, sampling: dict[str, Any]) -> Stream:
        """Begin a request. Its stream is closed by `close`, always.

        Raises:
            Refused: the worker is gone for the moment, too many requests wait, or the request cannot be served.
        """
        self.check_room()
        stream = Stream(f"request-{next(self._names)}", ids, new, sampling)
        self.running[stream.name] = stream
        try:
            self._submit(stream)
        except BaseException:
            del self.running[stream.name]
            raise
        return stream

    def check_room(self) -> None:
        """Refuse a request that nothing would answer for the moment.

        Raises:
            Refused: with 503 where the worker is gone, with 429 where `most` requests run or wait.
        """
        if self.died() is not None or self.lost is not None:
            raise worker_is_gone()
        if len(self.running) >= self.most:
            raise Refused(
                f"{len(self.running)} requests run or wait, this server's bound: send the request later, or start "
                "qattn serve with a larger --max-requests",
                status=429,
                code="too_many_requests",
            )

    def close(self, stream: Stream, ended: bool) -> None:
        """Forget a stream; one that has not `ended` is cancelled."""
        if self.running.pop(stream.name, None) is None:
            return
        if ended:
            self._deaths = 0
        else:
            stream.cancelled = True
            self._cancel(stream)

    def end_streams(self, error: Exception) -> None:
        """Let every stream end with this error; on the event loop."""
        for stream in list(self.running.values()):
            stream.push(error)

    def heal(self) -> str | None:
        """Restart a worker that died, and say so in words; None where none did. Sets `lost` where that is no use."""
        error = self.died()
        if error is None or self.lost is not None:
            return None
        self.end_streams(worker_is_gone())
        self._deaths += 1
        what = f"the worker ended: {type(error).__name__}: {error}"
        if self._deaths > RESTARTS:
            self.lost = error
            return f"{what}; {RESTARTS} restarts brought no answer, so the process ends"
        try:
            self.restart()
        except Exception as second:
            self.lost = second
            return f"{what}; a restart failed with {type(second).__name__}: {second}, so the process ends"
        return f"{what}; it was restarted, and its requests have got an error"


def worker_is_gone() -> Refused:
    """What requests are told whose worker died."""
    return Refused("the worker ended and is being restarted: send the request again", status=503, code="worker_ended")
