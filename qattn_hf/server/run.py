"""A process that serves: its port, its worker, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn

from qattn_hf.errors import UnsupportedError
from qattn_hf.generate.continuous import transformers_api
from qattn_hf.model.loading import load, short_name
from qattn_hf.patching.patcher import patch
from qattn_hf.server.app import build
from qattn_hf.server.engine import MOST, Engine
from qattn_hf.server.one_by_one import OneByOne
from qattn_hf.server.refusals import Refused
from qattn_hf.server.service import Service

if TYPE_CHECKING:
    from qattn_hf.recipes.recipe import Recipe

logger = logging.getLogger(__name__)

WATCHED = 0.2  # seconds between two looks at the worker
GRACE = 1  # seconds that answers have after Ctrl-C, for the words that end them
LOST = 3  # exit code where the worker cannot be restarted
DEMO = "demo"  # name of the embedded model


@dataclass(frozen=True)
class Options:
    """How to serve.

    Attributes:
        model: folder or hub name; None for the embedded model.
        name: what requests send as `model`; None for the model's name.
        batching: whether to serve requests together; None if transformers can.
        blocks: blocks of 256 tokens in the pool; None for all that fit.
        batch_tokens: most tokens of a forward; None for transformers' default.
        device: None for a GPU if there is one.
        dtype: of the model; `auto` is the checkpoint's.
        key: that clients must send; None serves everybody.
        max_body: most bytes of a request's body.
        max_requests: most requests that run or wait at once.
    """

    model: str | None
    name: str | None = None
    batching: bool | None = None
    blocks: int | None = None
    batch_tokens: int | None = None
    device: str | None = None
    dtype: str = "auto"
    key: str | None = None
    max_body: int = 4 * 2**20
    max_requests: int = MOST


def serve(recipe: Recipe, options: Options, sockets: list[socket.socket]) -> int:
    """Serve until Ctrl-C, in the main thread, and return the process's exit code.

    Args:
        recipe: of the model. sockets: of `ports.listening`.

    Raises:
        QAttnError: the model cannot be served so.
    """
    service = loaded(recipe, options)
    host, port = sockets[0].getsockname()[:2]
    print(f"serving {service.name} at http://{host}:{port}/v1; Ctrl-C ends it", file=sys.stderr, flush=True)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal once more after its end
        Server(service, options).run(sockets=sockets)
    code = 0 if service.engine.lost is None else LOST
    if not service.engine.stop():
        logger.warning("the worker is in the middle of a step: the process ends without it")
    return code


def loaded(recipe: Recipe, options: Options) -> Service:
    """The model, patched, with its worker running; what there is is printed on stderr.

    Raises:
        QAttnError: the model cannot be served so.
        UnsupportedError: the recipe packs nothing, or transformers is too old for `batching`.
    """
    if not recipe.settings.packs():
        raise UnsupportedError("cache='model' packs nothing that a server could share: use transformers serve itself")
    if options.batching:
        transformers_api.check_version()
    found = load(options.model, options.device, options.dtype)
    model = patch(found.model, recipe=recipe)
    eos = end_ids(model, found.tokenizer)
    engine: Engine
    together = transformers_api.continuous_api is not None if options.batching is None else options.batching
    if not together:
        engine = OneByOne(model, found.tokenizer, eos)
    else:
        from qattn_hf.server.batching import Batching

        try:
            engine = Batching(model, options.blocks, options.batch_tokens, eos)
        except UnsupportedError as error:
            raise UnsupportedError(f"{error}; --no-batching serves one request after the other") from error
    engine.most = options.max_requests
    name = options.name or (DEMO if options.model is None else short_name(options.model))
    print(engine.start(), file=sys.stderr, flush=True)
    service = Service(name, model, found.tokenizer, engine, eos)
    if service.plain:
        print("the model has no chat template: chats are lines such as 'user: Hello'", file=sys.stderr, flush=True)
    return service


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the ids that end an answer, from the generation config or else the tokenizer."""
    found = model.generation_config.eos_token_id
    found = tokenizer.eos_token_id if found is None else found
    return [] if found is None else [found] if isinstance(found, int) else list(found)


class Server(uvicorn.Server):
    """uvicorn's server, which watches the worker and ends streams in words.

    Args:
        service: whose engine runs; where its worker is lost, the server ends.
    """

    def __init__(self, service: Service, options: Options):
        app = build(service, options.key, options.max_body)
        super().__init__(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=GRACE)
        )
        self._engine = service.engine

    async def main_loop(self) -> None:
        watching = asyncio.ensure_future(self._watch())
        try:
            await super().main_loop()
        finally:
            watching.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCHED)
            if (words := self._engine.heal()) is not None:
                logger.error(words)
            if self._engine.lost is not None:
                self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.end_streams(Refused("the server is ending: send the request later", status=503, code="ending"))
        await super().shutdown(sockets)
