"""Figures of the server for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from qattn_hf.server.engine import Engine
from qattn_hf.server.service import Record

GAUGES = {
    "requests_running": "Requests that generate tokens.",
    "requests_waiting": "Requests that wait for room.",
    "blocks": "Blocks of the pool.",
    "blocks_used": "Blocks of the pool that requests hold.",
    "blocks_cached": "Blocks of ended requests, kept for prompts that begin as theirs did.",
    "block_tokens": "Tokens of a block.",
    "bytes": "Bytes of the pool.",
    "bytes_packed": "Bytes of keys and values that requests hold.",
}
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Counters of one server, in a separate registry.

    Args:
        engine: source of the gauges. A gauge is left out if the engine does not have its figure.
    """

    def __init__(self, engine: Engine):
        self.registry = CollectorRegistry()
        kept: Any = {"registry": self.registry, "namespace": "qattn"}
        self._requests = Counter("requests", "Requests answered.", ["path", "status"], **kept)
        self._prompt = Counter("prompt_tokens", "Tokens of prompts.", **kept)
        self._completion = Counter("completion_tokens", "Tokens of answers.", **kept)
        self._first = Histogram("first_token_seconds", "Time to the first token.", buckets=SECONDS, **kept)
        self._total = Histogram("request_seconds", "Time of requests with an answer.", buckets=SECONDS, **kept)
        for name in engine.figures():
            if name in GAUGES:
                gauge = Gauge(name if name.startswith("requests") else f"pool_{name}", GAUGES[name], **kept)
                gauge.set_function(lambda name=name: engine.figures()[name])  # type: ignore[misc]

    def count(self, path: str, status: int, record: Record) -> None:
        """Count one request."""
        self._requests.labels(path, status).inc()
        self._prompt.inc(record.prompt)
        self._completion.inc(record.completion)
        if record.first_ms is not None:
            self._first.observe(record.first_ms / 1e3)
            self._total.observe(record.ms() / 1e3)

    def text(self) -> bytes:
        """All figures, in Prometheus's text format."""
        return generate_latest(self.registry)
