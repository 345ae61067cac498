"""`qattn serve`: transformers' own server over packed pages, asked by OpenAI's client."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qattn_hf import UnsupportedError, patch, report
from qattn_hf.assets import demo_model_dir
from qattn_hf.continuous import transformers_api
from qattn_hf.continuous.server import start
from qattn_hf.recipe import find_recipe

for module in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(module, reason=f"{module} is not installed: pip install 'qattn-hf[serve]' openai")
pytestmark = pytest.mark.skipif(
    transformers_api.continuous_api is None, reason="this transformers has no pool that packed pages fit"
)
TURNS = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, with a chat template."""
    found = tmp_path_factory.mktemp("served")
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir())
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(found)
    AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.float32).save_pretrained(found)
    return found


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[Any, Any]]:
    """The server and a client of it."""
    import openai

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    sizes = {"cb_num_blocks": 16, "cb_max_batch_tokens": 256}
    options = {"continuous_batching": True, "device": "cpu", "host": "localhost", "port": port, "log_level": "error"}
    server = start(find_recipe("turbo", None, {}), force_model=str(folder), **sizes, **options)
    for _ in range(600):
        if server.server.started:
            break
        time.sleep(0.05)
    yield server, openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0, timeout=120)
    server.kill_server()


def test_clients_get_what_generate_gives(folder: Path, served: tuple[Any, Any]):
    server, client = served
    prompts = ["Once upon a time", "The ship", "He said that the long way home was"]

    def ask(prompt: str) -> str:
        made = client.completions.create(model=str(folder), prompt=prompt, max_tokens=20, temperature=0)
        return made.choices[0].text

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    (loaded,) = server._model_manager.loaded_models.values()
    assert report(loaded.model).to_dict()["continuous_batching"]["most_requests"] >= 1
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = patch(AutoModelForCausalLM.from_pretrained(folder), "turbo")
    for prompt, answer in zip(prompts, answers, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt")
        made = model.generate(
            inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=20, do_sample=False
        )
        assert answer == tokenizer.decode(made[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def test_a_chat_is_streamed(folder: Path, served: tuple[Any, Any]):
    messages = [{"role": "user", "content": "Good morning"}]
    stream = served[1].chat.completions.create(model=str(folder), messages=messages, max_tokens=8, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in stream if part.choices)


def test_a_recipe_that_packs_nothing_is_refused(folder: Path):
    with pytest.raises(UnsupportedError, match="packs nothing"):
        start(find_recipe("sage2", None, {"cache": "model"}), force_model=str(folder))
