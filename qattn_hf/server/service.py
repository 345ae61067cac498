"""One served model: what a request is checked against before it costs anything, and its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from qattn_hf.generate.continuous.admission import RequestError
from qattn_hf.server.engine import Engine, Stream
from qattn_hf.server.refusals import Refused
from qattn_hf.server.sampling import sampling_of
from qattn_hf.server.schemas import ChatRequest, CompletionRequest, Request
from qattn_hf.server.text import PLAIN, PLAIN_STOP, Text, chat_text, token_ids


@dataclass
class Record:
    """What is logged and counted of one HTTP request, in ms since it came.

    Attributes:
        name: of the answer. prompt, completion: tokens. bits: of a value in its packed cache. left: the client closed
            its connection before the end.
    """

    name: str = "-"
    prompt: int = 0
    completion: int = 0
    bits: float | None = None
    first_ms: float | None = None
    left: bool = False
    began: float = field(default_factory=time.perf_counter)

    def ms(self) -> float:
        """Time since the request came."""
        return 1e3 * (time.perf_counter() - self.began)


@contextmanager
def refusing(param: str, code: str) -> Iterator[None]:
    """Let a `RequestError` inside be a `Refused` of this field."""
    try:
        yield
    except RequestError as error:
        raise Refused(str(error), param=param, code=code) from None


class Service:
    """A model under a name.

    Args:
        name: what requests send as `model`. model: patched. tokenizer: of the model. engine: of the model.
        eos: ids that end an answer.
    """

    def __init__(self, name: str, model: Any, tokenizer: Any, engine: Engine, eos: list[int]):
        self.name, self.engine, self.tokenizer, self.eos = name, engine, tokenizer, frozenset(eos)
        self.created = int(time.time())
        self._config = model.generation_config
        stops = self._config.stop_strings
        self._stops = [stops] if isinstance(stops, str) else list(stops or [])
        self.plain = not getattr(tokenizer, "chat_template", None)
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        tokenizer("a")  # settles what a first call changes in a fast tokenizer, which threads share

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name; none is this model.

        Raises:
            Refused: with 404.
        """
        if name is not None and name != self.name:
            raise Refused(
                f"the model {name!r} is not served: send model={self.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def chat(self, request: ChatRequest, record: Record) -> Answer:
        """Begin the answer to a chat.

        Raises:
            Refused: the request cannot be served.
        """
        self.check_model(request.model)
        self.engine.check_room()  # before its text costs anything
        messages = [message.plain() for message in request.messages]
        options = request.chat_template_kwargs or {}
        template = PLAIN if self.plain else None

        def read() -> list[int]:
            text = chat_text(self.tokenizer, messages, template, options)
            return self._ids(text, self.plain, "messages")  # a template writes special tokens itself

        ids = await asyncio.to_thread(read)
        own = [PLAIN_STOP] if self.plain else []
        return self._begin(request, request.new_tokens(), ids, [*request.stops(), *own], "messages", record)

    async def completion(self, request: CompletionRequest, record: Record) -> Answer:
        """Begin the continuation of a prompt.

        Raises:
            Refused: the request cannot be served.
        """
        self.check_model(request.model)
        self.engine.check_room()
        ids = request.prompt
        if isinstance(ids, str):
            ids = await asyncio.to_thread(self._ids, ids, True, "prompt")
        return self._begin(request, request.new_tokens(), ids, request.stops(), "prompt", record)

    def _ids(self, text: str, special: bool, param: str) -> list[int]:
        """Ids of a text; one that is too long however it is cut is refused before, since reading megabytes takes a
        minute."""
        least = len(text) // self._longest_token
        if least > self.engine.limits.longest:
            raise Refused(
                f"the prompt has {len(text):,} characters, at least {least:,} tokens, and prompt and answer have room "
                f"for {self.engine.limits.longest:,}: shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )
        return token_ids(self.tokenizer, text, special, param)

    def _begin(
        self, request: Request, new: int | None, ids: list[int], stops: list[str], param: str, record: Record
    ) -> Answer:
        limits = self.engine.limits
        with refusing(param, "context_length_exceeded" if len(ids) >= limits.longest else "invalid_prompt"):
            ids = limits.ids(ids)
        with refusing("max_tokens", "context_length_exceeded"):
            new = limits.new_tokens(len(ids), new)
        stream = self.engine.submit(ids, new, sampling_of(request, self._config))
        record.prompt = len(ids)
        return Answer(self, stream, Text(self.tokenizer, [*stops, *self._stops]), record)


class Answer:
    """One answer while it is made.

    Attributes:
        finish: `stop` where the model or a stop string ended it, else `length`; None before its end.
    """

    def __init__(self, service: Service, stream: Stream, text: Text, record: Record):
        self._service, self._stream, self._text, self.record = service, stream, text, record
        self.finish: str | None = None
        self._ended = False

    async def pieces(self) -> AsyncIterator[str]:
        """Pieces of the text, none of them empty. The request ends where the reader leaves.

        Raises:
            Refused: the worker could not finish it.
        """
        try:
            async for tokens in self._stream:
                piece = "".join([self._take(token) for token in tokens if self.finish is None])
                if piece:
                    yield piece
                if self._text.stopped:
                    break
            else:
                self._ended = True
            if rest := self._text.end():
                yield rest
            if self._text.stopped:  # a stop string may end inside the held text
                self.finish = "stop"
            self.finish = self.finish or "length"
        finally:
            self.close()

    def close(self) -> None:
        """End the request, if it has not ended: whoever began it calls this."""
        self.record.bits = self._stream.bits
        self._service.engine.close(self._stream, self._ended)

    def _take(self, token: int) -> str:
        """Count a token, and the text that it makes certain."""
        self.record.completion += 1
        if self.record.first_ms is None:
            self.record.first_ms = self.record.ms()
        if token in self._service.eos:
            self.finish = "stop"
            return ""
        piece = self._text.add(token)
        if self._text.stopped:
            self.finish = "stop"
        return piece

    def usage(self) -> dict[str, int]:
        """Token counts as OpenAI gives them."""
        prompt, made = self.record.prompt, self.record.completion
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
