"""Many clients at once, some of them misbehaving, the end of a stream, and a server process from start to end."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_continuous_batching import needs_pages

here = pytest.importorskip(
    "served", reason="no server is installed: pip install 'qattn-hf[serve]'", exc_type=ImportError
)
ROOT = Path(__file__).resolve().parent.parent
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SHIP = {"prompt": "The ship", "max_tokens": 24, "temperature": 0}


def whole(client: Any, number: int) -> tuple[str, Any]:
    return "answered", client.complete(**SHIP)


def streams(client: Any, number: int) -> tuple[str, Any]:
    return "answered", "".join(event["choices"][0]["text"] for event in client.events(COMPLETIONS, SHIP))


def stops(client: Any, number: int) -> tuple[str, Any]:
    client.complete(**{**SHIP, "prompt": "Once", "max_tokens": 100, "stop": ["e", "a", " "]})
    return "served", None


def leaves(client: Any, number: int) -> tuple[str, Any]:
    """Reads the beginning of a stream and hangs up."""
    answer = client.send(COMPLETIONS, {**SHIP, "max_tokens": 300, "stream": True})
    assert answer.readline().startswith(b"data: ")
    answer.close()
    return "left", None


def hangs_up(client: Any, number: int) -> tuple[str, Any]:
    """Leaves before the answer, or in the middle of the request."""
    with socket.create_connection(("127.0.0.1", client.port), here.SECONDS) as one:
        body = b'{"prompt": "The ship", "max_tokens": 300}'
        said = len(body) + 100 * (number % 2)
        one.sendall(b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (COMPLETIONS.encode(), said, body))
    return "left", None


def refused(body: Any, status: int, client: Any, number: int) -> tuple[str, Any]:
    found, answer = client.ask(COMPLETIONS, body)
    assert found == status and answer["error"]["message"], (body, answer)
    return "refused", None


def long(client: Any, number: int) -> tuple[str, Any]:
    """A request of all the tokens that the model has positions for: half of the pool."""
    assert len(client.complete([5 + number] * (here.POSITIONS - 4), max_tokens=4)) > 0
    return "served", None


KINDS: list[Callable[[Any, int], tuple[str, Any]]] = [
    *(whole, streams, streams, stops, leaves, leaves, hangs_up, hangs_up, long),
    partial(refused, {"prompt": ""}, 400),
    partial(refused, {"prompt": [9] * 10 * here.POSITIONS}, 400),
    partial(refused, {"prompt": "a", "max_tokens": 10**9}, 400),
    partial(refused, {"prompt": [10**6]}, 400),
    partial(refused, b"not json", 400),
    partial(refused, b"x" * (2 * 2**20), 413),
]


@pytest.mark.parametrize(
    "together", [pytest.param(True, marks=needs_pages), pytest.param(False, marks=pytest.mark.slow)]
)
def test_thirty_clients_leave_a_server_that_answers(tmp_path: Path, together: bool):
    """Of a pool of 1,024 tokens."""
    with here.served(here.small_model(tmp_path), "none", blocks=4, max_body=2**20, batching=together) as client:
        thirty_clients(client, "none")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="what kernels serve of many clients needs a GPU")
@pytest.mark.parametrize("method", ["none", "turbo", "kivi"])
def test_a_gpu_serves_thirty_clients(tmp_path: Path, method: str):
    model = here.small_model(tmp_path, head_dim=64)
    options = {"blocks": 16, "max_body": 2**20, "device": "cuda", "dtype": "bfloat16"}
    with here.served(model, method, **options) as client:
        thirty_clients(client, method)


def thirty_clients(client: Any, method: str) -> None:
    """Let 30 clients ask at once, and check that the server answers afterwards.

    If codes are exact, equal questions have equal answers; otherwise they differ by a batch's rounding.
    """
    want = client.complete(**SHIP)
    kinds = [KINDS[number % len(KINDS)] for number in range(30)]
    with ThreadPoolExecutor(len(kinds)) as pool:
        found = list(pool.map(lambda one: one[1](client, one[0]), enumerate(kinds)))
    assert Counter(word for word, _ in found) == {"answered": 6, "served": 4, "left": 8, "refused": 12}
    client.until_idle()  # those that left were cancelled
    engine = client.service.engine
    assert engine.running == {} and engine.lost is None and engine.died() is None
    if "blocks_used" in engine.figures():
        assert client.gauge("qattn_pool_blocks_used") == 0
    if not torch.cuda.is_available() and method == "none":
        assert {answer for word, answer in found if word == "answered"} == {want}
        assert client.complete(**SHIP) == want
    assert client.ask("/health")[0] == 200 and client.complete(**SHIP)


def test_a_stop_string_in_the_held_text_ends_the_answer():
    """The last token ends with half of a character, so its text comes after the last token."""
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "go on \N{REPLACEMENT CHARACTER}" if ids else "")
    service = SimpleNamespace(eos=(), engine=SimpleNamespace(close=lambda *_: None))

    async def read() -> Any:
        stream = here.Stream("one", [], 1, {})
        stream.push([5])
        stream.push(None)
        answer = here.Answer(service, stream, here.Text(tokenizer, ["on"]), here.Record())
        return "".join([piece async for piece in answer.pieces()]), answer.finish

    assert asyncio.run(read()) == ("go ", "stop")


@pytest.mark.slow
def test_openais_client_is_served(tmp_path: Path):
    openai = pytest.importorskip("openai", reason="openai is not installed: pip install openai")
    with here.served(here.small_model(tmp_path), key="secret") as client:
        asks = openai.OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key="secret", max_retries=0)
        messages = [{"role": "user", "content": "Good morning"}]
        made = asks.chat.completions.create(model="small", messages=messages, max_tokens=8)
        parts = asks.chat.completions.create(model="small", messages=messages, max_tokens=8, stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == made.choices[0].message.content and made.usage.completion_tokens == 8
        assert [one.id for one in asks.models.list()] == ["small"]
        with pytest.raises(openai.BadRequestError, match="one request has one answer"):
            asks.completions.create(model="small", prompt="a", n=2)
        with pytest.raises(openai.AuthenticationError):
            asks.with_options(api_key="wrong").models.list()


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [pytest.param([], marks=pytest.mark.exhaustive), ["--no-batching"]],  # `.ci/run` has the first as a step
    ids=["together", "in turn"],
)
def test_a_process_is_started_asked_and_ended_by_ctrl_c(more: list[str]):
    """By the script that CI runs, too: a chat without any argument, and Ctrl-C in a stream."""
    command = [sys.executable, str(ROOT / ".ci" / "serve.py"), sys.executable, "-m", "qattn_hf", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
