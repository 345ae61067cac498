"""Answers in the shapes of OpenAI's API, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi.responses import JSONResponse, Response

from qattn_hf.server.refusals import Refused
from qattn_hf.server.service import Answer


class Shape:
    """How one answer is written.

    Args:
        answer: what is written. model: its name. chat: as `/v1/chat/completions` writes it, else `/v1/completions`.
    """

    def __init__(self, answer: Answer, model: str, chat: bool):
        self.answer, self._chat = answer, chat
        kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": answer.record.name, "object": kind, "created": int(time.time()), "model": model}

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        text = "".join([piece async for piece in self.answer.pieces()])
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {**self._head, "choices": [self._choice(content, self.answer.finish)], "usage": self.answer.usage()}

    async def events(self, usage: bool) -> AsyncIterator[str]:
        """The answer as events, `[DONE]` the last; after an error of the worker, its body is.

        Args:
            usage: whether an event before the last has token counts.
        """
        if self._chat:
            yield self._event([self._choice({"delta": {"role": "assistant", "content": ""}})])
        try:
            async for piece in self.answer.pieces():
                yield self._event([self._choice({"delta": {"content": piece}} if self._chat else {"text": piece})])
        except Refused as refused:
            yield _event(refused.body())
            return
        yield self._event([self._choice({"delta": {}} if self._chat else {"text": ""}, self.answer.finish)])
        if usage:
            yield self._event([], usage=self.answer.usage())
        yield "data: [DONE]\n\n"

    def _choice(self, content: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        head = {**self._head, "object": "chat.completion.chunk"} if self._chat else self._head
        return _event({**head, "choices": choices, **more})


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


class Reply(Response):
    """A response that writes one answer, and ends it where the client leaves.

    Args:
        shape: how the answer is written. stream: as events. usage: whether an event has token counts.
    """

    def __init__(self, shape: Shape, stream: bool, usage: bool):
        super().__init__()
        self._shape, self._stream, self._usage = shape, stream, usage

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        writing = asyncio.ensure_future(self._write(scope, receive, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            self._shape.answer.record.left = not writing.done()
            if writing.done():
                await writing
        finally:
            for task in (writing, leaving):
                task.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)
            self._shape.answer.close()

    async def _write(self, scope: Any, receive: Any, send: Any) -> None:
        if self._stream:
            await _send_events(self._shape.events(self._usage), send)
            return
        try:
            response = JSONResponse(await self._shape.whole())
        except Refused as refused:
            response = refused.response()
        await response(scope, receive, send)


async def _send_events(events: AsyncIterator[str], send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for event in events:
        await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Callable[[], Awaitable[Any]]) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
