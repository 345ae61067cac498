"""What every request goes through: the key, the bound of its body, and its line in the log."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from qattn_hf.messages import size
from qattn_hf.server.metrics import Metrics
from qattn_hf.server.refusals import Refused
from qattn_hf.server.service import Record

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
CLIENT_LEFT = 499  # a status for the log, as nginx writes it; nobody receives it
DRAINED = 16  # read bodies of up to 16 times the bound to their end: a client that still writes reads no answer
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics")


class Left(Exception):
    """The client closed its connection."""


class Gate:
    """ASGI middleware around the whole application.

    Args:
        app: the application. metrics: count what is answered. key: of clients; None: everybody is served.
        max_body: bytes of a body at most.
    """

    def __init__(self, app: Any, metrics: Metrics, key: str | None, max_body: int):
        self._app, self._metrics, self._max_body = app, metrics, max_body
        self._key = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record, status = Record(), 500
        scope["record"] = record

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check_key(scope)
            body = await self._read(scope, receive)
            await self._app(scope, _replayed(body, receive), noted)
        except Refused as refused:
            await refused.response()(scope, receive, noted)
        except Left:
            status = CLIENT_LEFT
        finally:
            if record.left:
                status = CLIENT_LEFT
            self._note(scope, status, record)

    def _check_key(self, scope: Message) -> None:
        if self._key is None or not scope["path"].startswith("/v1"):
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, self._key):
            raise Refused(
                "the key is missing or wrong: send the header Authorization: Bearer KEY, with the server's --api-key",
                status=401,
                code="invalid_api_key",
            )

    async def _read(self, scope: Message, receive: Receive) -> bytes:
        """The whole body.

        Raises:
            Refused: it is larger than the bound. Left: the client went.
        """
        parts, length = [], 0
        announced = int(dict(scope["headers"]).get(b"content-length", b"0") or 0)
        while announced <= DRAINED * self._max_body and length <= DRAINED * self._max_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Left
            part = message.get("body", b"")
            length += len(part)
            if length <= self._max_body:
                parts.append(part)
            if not message.get("more_body"):
                break
        if max(length, announced) > self._max_body:
            raise Refused(
                f"the body has more than {size(self._max_body)}, this server's bound: send a shorter prompt, or start "
                "qattn serve with a larger --max-body",
                status=413,
                code="body_too_large",
            )
        return b"".join(parts)

    def _note(self, scope: Message, status: int, record: Record) -> None:
        """A line in the log and the counters; probes of health and metrics are logged where somebody debugs."""
        path = scope["path"] if scope["path"] in PATHS else "other"
        self._metrics.count(path, status, record)
        probe = path in ("/health", "/metrics") and status == 200
        first = "-" if record.first_ms is None else f"{record.first_ms:.0f}"
        bits = "-" if record.bits is None else f"{record.bits:.2f}"
        logger.log(
            logging.DEBUG if probe else logging.INFO,
            "%s %s %d id=%s prompt_tokens=%d completion_tokens=%d first_token_ms=%s total_ms=%.0f bits=%s",
            scope["method"],
            path,
            status,
            record.name,
            record.prompt,
            record.completion,
            first,
            record.ms(),
            bits,
        )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body at once, and then what comes after it: the client's leaving."""
    given = False

    async def read() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return read
