"""The application: which paths there are, and what each answers."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from qattn_hf._version import __version__
from qattn_hf.server import refusals
from qattn_hf.server.answers import Reply, Shape
from qattn_hf.server.gate import Gate
from qattn_hf.server.metrics import Metrics
from qattn_hf.server.schemas import ChatRequest, CompletionRequest
from qattn_hf.server.service import Answer, Record, Service

TEXT = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus's format


def build(service: Service, key: str | None, max_body: int) -> FastAPI:
    """The application of one model.

    Args:
        service: the model, whose engine runs. key: of clients; None: everybody is served. max_body: bytes at most.
    """
    app, metrics = FastAPI(title="qattn serve", version=__version__), Metrics(service.engine)
    refusals.install(app)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        record = _record(request, "chatcmpl")
        return _reply(service, await service.chat(body, record), body, chat=True)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        record = _record(request, "cmpl")
        return _reply(service, await service.completion(body, record), body, chat=False)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)

    @app.get("/health")
    async def health() -> Response:
        error = service.engine.died()
        state = "ok" if error is None else "the worker ended and is being restarted"
        return JSONResponse({"status": state}, 200 if error is None else 503)

    @app.get("/metrics")
    async def figures() -> Response:
        return Response(metrics.text(), media_type=TEXT)

    app.add_middleware(Gate, metrics=metrics, key=key, max_body=max_body)
    return app


def _record(request: Request, kind: str) -> Record:
    """The record that `Gate` made of this request, with a name for its answer."""
    record: Record = request.scope["record"]
    record.name = f"{kind}-{uuid.uuid4().hex}"
    return record


def _reply(service: Service, answer: Answer, body: ChatRequest | CompletionRequest, chat: bool) -> Response:
    return Reply(Shape(answer, service.name, chat), bool(body.stream), body.wants_usage())


def _model(service: Service) -> dict[str, Any]:
    """The model as `/v1/models` lists it."""
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "qattn",
        "max_model_len": service.engine.limits.longest,
    }
