"""A process whose default dtype or default device is another than the model's: every method answers as without."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import FIXED, Case, case_id, cases, feed, make_layer, random_ids, random_qkv, same_state, tiny_llama

from qattn_hf import QAttnCache, patch, report
from qattn_hf.cli import main
from qattn_hf.fidelity.needles import Prompt, Question
from qattn_hf.fidelity.retrieval import answers
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.lm_eval.scoring import Text, score
from qattn_hf.model.loading import load
from qattn_hf.reading import texts

pytestmark = pytest.mark.usefixtures("no_grad")

PRIORITIES: list[Case] = [
    ("paper_turbo", {"bits": "mixed", "priority": name}) for name in ("entropy", "min_max", "variation", "random")
]
TWO_BITS: list[Case] = [("turbo", {"bits": 2}), ("kivi", {"bits": 2})]
CASES = [*cases(), *FIXED, *PRIORITIES, *TWO_BITS]
QKV = random_qkv(2, 107)
WORDS = random_ids(1, 90)[0].tolist()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


DEFAULTS: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),  # a tensor without an explicit device cannot be computed with
}


def conversation(layer: QAttnLayer) -> torch.Tensor:
    """Run a prompt, steps, a short call, a crop, a larger ring, reordered rows, and a call that closes a block."""
    q, k, v = QKV

    def read(start: int, *tokens: int) -> torch.Tensor:
        return feed(layer, *(x[:, :, start : start + sum(tokens)] for x in (q, k, v)), [*accumulate(tokens)])

    out = [read(0, 70, 1, 5)]
    layer.crop(-10)
    out.append(read(66, 1))
    layer.raise_horizon(80)
    layer.batch_select_indices([1, 0])
    layer.reorder_cache(torch.tensor([1, 0], device="cpu"))
    out.append(read(67, 40))
    return torch.cat(out, 2)


def initialized(case: Case) -> QAttnLayer:
    layer = make_layer(case, 128)
    layer.lazy_initialization(*QKV[1:])  # which gives it random constants
    return layer


@functools.cache
def without(index: int) -> tuple[QAttnLayer, torch.Tensor]:
    """A layer of a case after its conversation without other defaults, and the outputs."""
    layer = initialized(CASES[index])
    return layer, conversation(layer)


@pytest.mark.parametrize(
    "default", [*DEFAULTS][:1] + [pytest.param(name, marks=pytest.mark.slow) for name in [*DEFAULTS][1:3]] + ["meta"]
)
def test_codes_and_outputs_of_every_method(default: str):
    for index, case in enumerate(CASES):
        layer = initialized(case)
        twin, want = without(index)
        with DEFAULTS[default]():
            got = conversation(layer)
        assert torch.equal(got, want), case_id(case)
        assert same_state(layer, twin) == [], case_id(case)


@pytest.mark.parametrize("case", [("turbo", {}), ("turbo_rotated", {}), ("kivi", {"compensate_k": True})], ids=case_id)
def test_a_model_beside_another_default_device(case: Case, tmp_path: Path):
    """Patched, asked and its cache edited and saved where `torch.tensor` makes tensors on the meta device."""
    ids = random_ids(2, 150)
    stock, model, twin = (tiny_llama() for _ in range(3))
    greedy: dict[str, Any] = dict(do_sample=False, max_new_tokens=5)

    def edited(model: Any) -> torch.Tensor:
        patch(model, case[0], **case[1])
        cache = QAttnCache.for_model(model)
        model.generate(ids, past_key_values=cache, **greedy)
        cache.crop(-10)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices([0, 2])
        cache.reorder_cache(ids.new_tensor([1, 0]))
        cache.raise_horizon(200)
        cache.save(tmp_path / "saved", ids[:, :144])
        loaded = copy.deepcopy(QAttnCache.load(tmp_path / "saved", model))
        loaded.reset()
        assert case[0] in str(report(loaded))
        return model(ids[:, :3], past_key_values=QAttnCache.load(tmp_path / "saved", model)).logits

    want = edited(twin)
    with torch.device("meta"):
        stock.generate(ids, **greedy)
        assert torch.equal(edited(model), want)


class Words:
    """A tokenizer and a maker of prompts whose tokens are numbers of words; it makes no tensor."""

    bos_token_id = None

    @property
    def tokenizer(self) -> Words:
        return self

    def __call__(self, text: str, **options: Any) -> Any:
        return SimpleNamespace(input_ids=[int(word) for word in text.split()])

    def decode(self, ids: torch.Tensor) -> str:
        return str(ids.tolist())


def scored(model: Any, dtype: torch.dtype | None = None) -> Any:
    short, long = Text(tuple(WORDS[:70]), [WORDS[69:71]]), Text(tuple(WORDS), [WORDS[60:]])
    return [score(model, [text, text], 32, 0, dtype)[0] for text in (short, long)]


def cut(model: Any) -> Any:
    return texts.rows_of(Words(), " ".join(map(str, range(60))), 4, 8).tolist()


def answered(model: Any) -> Any:
    return answers(model, Words(), Prompt("single", 90, WORDS, [Question(WORDS[:5], ("1",), (0.0,), 4)], False), 32)[0]


@pytest.mark.parametrize("default", ["bfloat16", "float64", "meta"])
@pytest.mark.parametrize("measure", [scored, cut, answered])
def test_what_is_measured_beside_other_defaults(measure: Callable[[Any], Any], default: str):
    model = patch(tiny_llama(), "turbo")
    want = measure(model)
    with DEFAULTS[default]():
        assert measure(model) == want


@pytest.mark.parametrize("default", ["float64", "meta"])
def test_a_cache_is_built_by_the_command(default: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Loading is transformers', with its own rules, so it is done before."""
    (tmp_path / "text").write_text("Once upon a time there was a small ship. " * 9)
    found = load(None, "cpu")
    module = importlib.import_module("qattn_hf.cli.cache")  # the package's attribute of that name is a command
    monkeypatch.setattr(module, "load", lambda *given: found)
    with DEFAULTS[default](), pytest.raises(SystemExit) as ended:
        main(["cache", "build", "--text", str(tmp_path / "text"), "-o", str(tmp_path / "saved")])
    assert not ended.value.code and (tmp_path / "saved").is_file()
