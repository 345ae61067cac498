"""`qattn serve`: answers of OpenAI's API over packed pages, and requests that are refused in its body."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from test_continuous_batching import needs_pages
from transformers import AutoModelForCausalLM, AutoTokenizer

from qattn_hf import UnsupportedError, cli, patch
from qattn_hf.assets import demo_model_dir
from qattn_hf.generate.continuous import transformers_api
from qattn_hf.recipes.recipe import find_recipe

here = pytest.importorskip(
    "served", reason="no server is installed: pip install 'qattn-hf[serve]'", exc_type=ImportError
)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return here.small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[Any]:
    """A server of requests together, or in turn where transformers is too old."""
    with here.served(folder) as client:
        yield client


def generated(folder: str, prompt: str, tokens: int) -> str:
    """The likeliest answer, by `generate`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = patch(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), "turbo")
    inputs = tokenizer(prompt, return_tensors="pt")
    made = model.generate(inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=tokens)
    found: str = tokenizer.decode(made[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return found


def test_clients_get_what_generate_gives(folder: str, server: Any):
    prompts = ["Once upon a time", "The ship", "He said that the long way home was"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: server.complete(prompt, max_tokens=20, temperature=0), prompts))
    assert answers == [generated(folder, prompt, 20) for prompt in prompts]


def test_requests_in_turn_get_the_same(folder: str, server: Any):
    with here.served(folder, batching=False) as client:
        for settings in ({"temperature": 0}, {"stop": "a"}):
            want = server.complete("The ship", max_tokens=20, **settings)
            assert client.complete("The ship", max_tokens=20, **settings) == want
        draws = [client.complete("The ship", max_tokens=9, temperature=1, seed=seed) for seed in (1, 1, 2)]
        assert draws[0] == draws[1] != draws[2]
        assert client.ask(COMPLETIONS, {"prompt": "a", "max_tokens": here.POSITIONS})[0] == 400


@needs_pages
def test_each_request_has_its_own_sampling(server: Any):
    settings: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 1}, {"temperature": 2, "seed": 1}]
    settings += [{"top_k": 1}, {"temperature": 1, "seed": 2, "top_p": 0.5}, {"temperature": 1, "seed": 1}]

    def ask(given: dict[str, Any]) -> str:
        return server.complete("The ship", max_tokens=12, **given)

    with ThreadPoolExecutor(len(settings)) as pool:
        together = list(pool.map(ask, settings))
    assert together == [ask(one) for one in settings]
    assert together[0] == together[3] and together[1] == together[5]
    assert len(set(together)) == 4


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_is_the_answer_in_pieces(server: Any, path: str):
    body = {"max_tokens": 8, **(HELLO if path == CHAT else {"prompt": "Hello"})}
    status, whole = server.ask(path, body)
    assert status == 200 and whole["model"] == "small" and whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 8
    *events, last = server.events(path, {**body, "stream_options": {"include_usage": True}})
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    parts = [event["choices"][0] for event in events]
    assert [part["finish_reason"] for part in parts] == [*[None] * (len(parts) - 1), "length"]
    if path == CHAT:
        assert parts[0]["delta"]["role"] == "assistant"
        text = "".join(part["delta"].get("content", "") for part in parts)
        assert text == whole["choices"][0]["message"]["content"]
    else:
        assert "".join(part["text"] for part in parts) == whole["choices"][0]["text"]


def test_a_model_without_a_template_reads_lines(server: Any):
    """The template that docs/serve.md gives; the next line of the user would end the answer."""
    dumped = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}]
    messages += [{"role": "assistant", "content": "Yes.", **dumped}]  # an answer as OpenAI's client dumps it
    messages += [{"role": "user", "content": [{"type": "text", "text": "Good"}, {"type": "text", "text": "morning"}]}]
    found = server.ask(CHAT, {"messages": messages, "max_tokens": 12})[1]["choices"][0]["message"]["content"]
    assert found == server.complete(
        "system: Be brief.\nassistant: Yes.\nuser: Good\nmorning\nassistant:", max_tokens=12
    )


def test_a_chat_template_may_refuse(tmp_path: Path):
    template = "{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    template = "{{ bos_token }}" + template + "{{ messages[0]['content'] }}{{ tail }}"
    with here.served(here.small_model(tmp_path, template), batching=False) as client:
        answer = client.ask(CHAT, {**HELLO, "chat_template_kwargs": {"tail": " there"}, "max_tokens": 5})[1]
        assert answer["choices"][0]["message"]["content"] == client.complete("Hello there", max_tokens=5)
        status, body = client.ask(CHAT, {"messages": 2 * HELLO["messages"]})
        assert status == 400 and "one at a time" in body["error"]["message"]
        assert client.ask(CHAT, {**HELLO, "chat_template_kwargs": {"tokenize": True}})[0] == 400


def test_a_stop_string_is_cut_out_where_it_spans_tokens(server: Any):
    whole = server.complete("Once", max_tokens=40, temperature=0)
    stop = whole[len(whole) // 3 :][:9]
    want = whole[: whole.index(stop)]
    status, body = server.ask(COMPLETIONS, {"prompt": "Once", "max_tokens": 40, "temperature": 0, "stop": [stop, "\0"]})
    assert status == 200 and (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (want, "stop")
    assert body["usage"]["completion_tokens"] < 40
    events = server.events(COMPLETIONS, {"prompt": "Once", "max_tokens": 40, "temperature": 0, "stop": stop})
    assert "".join(event["choices"][0]["text"] for event in events) == want


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    *[({"prompt": prompt}, "prompt") for prompt in ("", [], [[]], ["a", "b"], [-1], [4096], [2**70], [1.5], 5, None)],
    ({"prompt": "a \ud800"}, "prompt"),
    ({"prompt": [5] * here.POSITIONS}, "prompt"),
    ({"prompt": "word " * 200_000}, "prompt"),
    ({}, "prompt"),
    *[
        ({"prompt": "a", "max_tokens": value}, "max_tokens")
        for value in (-1, 0, here.POSITIONS, 10**9, 10**400, 1.5, "5")
    ],
    *[({"prompt": "a", "temperature": value}, "temperature") for value in (-1, 2.5, float("nan"), "1", True)],
    *[({"prompt": "a", "top_p": value}, "top_p") for value in (-0.1, 0, 1.1)],
    ({"prompt": "a", "top_k": -1}, "top_k"),
    ({"prompt": "a", "seed": -1}, "seed"),
    ({"prompt": "a", "seed": 2**63}, "seed"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop": ["a"] * 17}, "stop"),
    ({"prompt": "a", "presence_penalty": -0.5}, "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": 3}, "frequency_penalty"),
    ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias"),
    ({"prompt": "a", "n": 2}, "n"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "logprobs": 0}, "logprobs"),
    ({"prompt": "a", "echo": True}, "echo"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "wish": 1}, "wish"),
    ({"messages": []}, "messages"),
    ({**HELLO, "logprobs": True}, "logprobs"),
    ({**HELLO, "top_logprobs": 2}, "top_logprobs"),
    ({**HELLO, "tools": [{"type": "function"}]}, "tools"),
    ({**HELLO, "response_format": {"type": "json_object"}}, "response_format"),
    ({**HELLO, "response_format": "poem"}, "response_format"),
    ({**HELLO, "max_completion_tokens": -1}, "max_completion_tokens"),
    ({"messages": [{"role": "user", "content": "word " * here.POSITIONS}]}, "messages"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages.0.role"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]}, "messages.0.tool_calls"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
]


def test_what_cannot_be_served_is_refused_in_words(server: Any):
    for body, param in REFUSED:
        status, answer = server.ask(CHAT if "messages" in body else COMPLETIONS, body)
        error = answer["error"]
        assert (status, set(error)) == (400, {"message", "type", "param", "code"}), (body, answer)
        assert error["param"].startswith(param) and error["type"] == "invalid_request_error" and error["message"], body
    for data in (b"", b"no json", b"[]", b"\xff", b"[" * 100_000):
        assert server.ask(COMPLETIONS, data)[0] == 400
    assert server.complete("a", max_tokens=1, n=1, logprobs=None, echo=False, user="me", presence_penalty=0) is not None


def test_unknown_names_and_paths(server: Any):
    for body in ({"prompt": "a", "model": "other"}, {"prompt": "a", "model": "\ud800"}):
        status, answer = server.ask(COMPLETIONS, body)
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert server.ask("/v1/models/other")[0] == 404
    assert server.ask("/v1/nothing")[1]["error"]["message"]
    assert server.ask(COMPLETIONS)[0] == 405
    (listed,) = server.ask("/v1/models")[1]["data"]
    assert listed["id"] == "small" and server.ask("/v1/models/small")[1] == listed


def test_a_key_is_asked_for_and_a_large_body_refused(server: Any):
    options = here.Options(model=None, key="secret", max_body=1000)
    with here.running(server.service, options) as client:
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            status, body = client.ask(COMPLETIONS, {"prompt": "a"}, **given)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert client.ask("/health") == (200, {"status": "ok"})
        own = {"Authorization": "Bearer secret"}
        assert client.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, **own)[0] == 200
        status, body = client.ask(COMPLETIONS, b"x" * 15_000, **own)
        assert (status, body["error"]["code"]) == (413, "body_too_large")
        assert client.ask("/v1/models", **own)[0] == 200


@pytest.mark.parametrize("together", [pytest.param(True, marks=needs_pages), False], ids=["together", "in turn"])
def test_more_requests_than_the_bound_are_refused_until_one_ends(folder: str, together: bool):
    with here.served(folder, batching=together, max_requests=2) as client:
        long = {"prompt": "The ship", "max_tokens": 480, "temperature": 0, "stream": True}
        held = [client.send(COMPLETIONS, long) for _ in range(2)]
        assert all(answer.readline().startswith(b"data: ") for answer in held[: 2 if together else 1])
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, HELLO)):
            answer = client.send(path, body)
            error = json.loads(answer.read())["error"]
            assert answer.status == 429 and answer.getheader("Retry-After") == "1"
            assert error["code"] == "too_many_requests" and error["type"] == "rate_limit_error"
            assert "2 requests run or wait" in error["message"] and "--max-requests" in error["message"]
        for answer in held:
            answer.close()
        client.until_idle()
        assert client.complete("a", max_tokens=2)


def test_a_request_has_a_line_in_the_log_and_counts(server: Any, caplog: pytest.LogCaptureFixture):
    before = server.gauge("qattn_completion_tokens_total")
    with caplog.at_level(logging.INFO, "qattn_hf.server"):
        server.complete([5] * 70, max_tokens=3)
        # both come after the answer's last byte
        here.until(lambda: server.gauge("qattn_completion_tokens_total") == before + 3)
    (line,) = [record.getMessage() for record in caplog.records if f"{COMPLETIONS} 200" in record.getMessage()]
    assert "prompt_tokens=70 completion_tokens=3 first_token_ms=" in line
    server.ask(COMPLETIONS, {"prompt": []})
    refused = f'qattn_requests_total{{path="{COMPLETIONS}",status="400"}}'
    here.until(lambda: refused in server.ask("/metrics")[1])  # counted after the answer's last byte too
    if transformers_api.continuous_api is not None:
        assert float(line.rpartition("=")[2]) > 4  # heads of 16 have large scales
        server.until_idle()
        assert server.gauge("qattn_pool_bytes_packed") < server.gauge("qattn_pool_bytes")


@pytest.mark.parametrize("together", [pytest.param(True, marks=needs_pages), False], ids=["together", "in turn"])
def test_a_dead_worker_is_restarted_and_at_last_ends_the_process(
    folder: str, monkeypatch: pytest.MonkeyPatch, together: bool
):
    """What ends a worker is nothing that a request can bring, such as the end of its thread."""
    if together:
        from qattn_hf.generate.continuous.manager import PackedBatchingManager as Worker

        name = "_generation_step"
    else:
        from qattn_hf.server.one_by_one import OneByOne as Worker  # type: ignore[assignment]

        name = "_answer"
    step, deadly = getattr(Worker, name), 1

    def fails(*args: Any) -> None:
        nonlocal deadly
        deadly -= 1
        if deadly >= 0:
            raise SystemExit("the device is gone")
        step(*args)

    monkeypatch.setattr(Worker, name, fails)
    sockets = here.listening("127.0.0.1", 0)
    client = here.Client(sockets[0].getsockname()[1])
    options = here.Options(model=folder, blocks=8, device="cpu", dtype="float32", batching=together)
    codes: list[int] = []
    arguments = find_recipe("turbo", None, {}), options, sockets
    # a daemon, so that a failure of this test does not wait for a server that goes on
    Thread(target=lambda: codes.append(here.serve(*arguments)), daemon=True).start()
    status, body = client.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 2})
    assert status in (500, 503) and "ended" in body["error"]["message"]
    # requests get 503 until the server has noticed the end of its worker and started another
    here.until(lambda: client.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 2})[0] == 200)
    assert client.ask("/health")[0] == 200
    deadly = 1000

    def ended() -> bool:
        with suppress(OSError):
            client.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 2})
        return bool(codes)

    here.until(ended)
    assert codes == [here.LOST]


def test_a_request_that_fails_in_turn_fails_alone(folder: str, monkeypatch: pytest.MonkeyPatch):
    with here.served(folder, batching=False) as client:
        generate = client.service.engine._model.generate

        def fails(ids: torch.Tensor, **kwargs: Any) -> Any:
            if int(ids[0, 0]) == 7:
                raise RuntimeError("out of memory")
            return generate(ids, **kwargs)

        monkeypatch.setattr(client.service.engine._model, "generate", fails)
        status, body = client.ask(COMPLETIONS, {"prompt": [7, 5], "max_tokens": 2})
        assert status == 500 and "out of memory" in body["error"]["message"]
        answer = client.send(COMPLETIONS, {"prompt": [7, 5], "max_tokens": 2, "stream": True})
        assert b"out of memory" in answer.read()
        assert client.ask("/health")[0] == 200 and client.ask(COMPLETIONS, {"prompt": [5], "max_tokens": 2})[0] == 200


def test_a_body_that_is_no_json_object_is_told_the_header(server: Any):
    for status, body in (
        server.ask(COMPLETIONS, {"prompt": "a"}, content_type="application/x-www-form-urlencoded"),
        server.ask(COMPLETIONS, b"[]"),
        server.ask(COMPLETIONS, b""),
    ):
        assert status == 400 and "Content-Type: application/json" in body["error"]["message"]


def test_a_field_of_two_types_has_its_own_name(server: Any):
    status, body = server.ask(COMPLETIONS, {"prompt": "a", "stop": ""})
    assert (status, body["error"]["param"]) == (400, "stop")


def test_a_busy_port_is_an_error_before_anything_loads(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    def no(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("qattn_hf.model.loading.load", no)
    with socket.socket() as busy, pytest.raises(SystemExit) as ended:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        cli.main(["serve", "--host", "127.0.0.1", "--port", str(busy.getsockname()[1])])
    assert ended.value.code == 1
    assert "in use; choose another with --port" in capsys.readouterr().err


def test_a_recipe_that_packs_nothing_is_refused(folder: str):
    with pytest.raises(UnsupportedError, match="packs nothing"):
        here.loaded(find_recipe("sage2", None, {"cache": "model"}), here.Options(model=folder))


def test_text_is_given_out_as_soon_as_it_is_certain():
    """Bytes of one character in several tokens; the pieces are the text of `decode`, whatever is held back."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir())
    whole = "The naïve ship – 東京 🚢 said: go home, go on. Stop here"
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    plain = here.Text(tokenizer, [])
    pieces = [plain.add(token) for token in ids]
    assert "".join([*pieces, plain.end()]) == tokenizer.decode(ids) and "\N{REPLACEMENT CHARACTER}" not in "".join(
        pieces
    )
    for stop in ("京 🚢 s", "go on", "go home, go off", "ere", "here!"):
        text, found = here.Text(tokenizer, [stop]), ""
        for token in ids:
            found += text.add(token)
            assert stop not in found and whole.startswith(found)
            if text.stopped:
                break
        found += text.end()
        assert found == (whole[: whole.index(stop)] if stop in whole else whole)
        assert text.stopped == (stop in whole)
