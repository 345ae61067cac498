"""A server inside the test process, and plain HTTP clients of it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from qattn_hf.assets import demo_model_dir
from qattn_hf.recipes.recipe import find_recipe
from qattn_hf.server.engine import Stream
from qattn_hf.server.ports import listening
from qattn_hf.server.run import LOST, Options, Server, loaded, serve
from qattn_hf.server.sampling import sampling_of
from qattn_hf.server.schemas import CompletionRequest
from qattn_hf.server.service import Answer, Record, Service
from qattn_hf.server.text import Text

__all__ = [
    "LOST",
    "Answer",
    "CompletionRequest",
    "Record",
    "Stream",
    "Text",
    "sampling_of",
    "serve",
]  # for tests, which are skipped where there is no server

POSITIONS = 512
SECONDS = 60  # after which a test gives up


def small_model(folder: Path, template: str | None = None, head_dim: int = 16) -> str:
    """A folder with a Llama of one layer and random weights, and the embedded model's tokenizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": head_dim}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(vocab_size=4096, max_position_embeddings=POSITIONS, eos_token_id=2, **sizes, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir())
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


class Client:
    """Plain requests to a server on this machine."""

    def __init__(self, port: int, service: Service | None = None):
        self.port, self.service = port, service

    def send(self, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
        """A request whose answer is not read yet: GET without a body, else POST; bytes go as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json", **{key.replace("_", "-"): x for key, x in headers.items()}}
        connection.request("GET" if body is None else "POST", path, data, given)
        return connection.getresponse()

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and body of an answer."""
        answer = self.send(path, body, **headers)
        text = answer.read()
        return answer.status, json.loads(text) if "json" in (answer.getheader("content-type") or "") else text.decode()

    def complete(self, prompt: Any, **settings: Any) -> str:
        """The text of a completion."""
        status, body = self.ask("/v1/completions", {"prompt": prompt, **settings})
        assert status == 200, body
        found: str = body["choices"][0]["text"]
        return found

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream, without the last."""
        answer = self.send(path, {**body, "stream": True})
        lines = [line for line in answer.read().decode().split("\n\n") if line]
        assert answer.status == 200 and lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def gauge(self, name: str) -> float:
        """A figure of `/metrics`."""
        text = self.ask("/metrics")[1]
        return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"{name} ")))

    def until_idle(self) -> None:
        """Waits until no request runs."""
        until(lambda: self.gauge("qattn_requests_running") == 0)


def until(reached: Any) -> None:
    """Waits for a condition."""
    last = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < last, "nothing happened in time"
        time.sleep(0.02)


@contextmanager
def served(model: str | None, method: str = "turbo", **options: Any) -> Iterator[Client]:
    """A server of a model in a thread."""
    given = Options(model=model, **{"name": "small", "blocks": 8, "device": "cpu", "dtype": "float32", **options})
    service = loaded(find_recipe(method, None, {}), given)
    with running(service, given) as client:
        yield client
    assert service.engine.stop()


@contextmanager
def running(service: Service, options: Options) -> Iterator[Client]:
    """A server of a service, whose worker goes on after its end."""
    sockets = listening("127.0.0.1", 0)
    server = Server(service, options)
    thread = threading.Thread(target=server.run, args=(sockets,))
    thread.start()
    try:
        yield Client(sockets[0].getsockname()[1], service)
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive()
