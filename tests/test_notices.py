"""Warnings that a patch gives once: codes that no token reads, layers without kernels, steps that cannot be
captured."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from fake_graphs import GREEDY, IDS, as_on_a_gpu, path
from helpers import random_ids, tiny_llama
from transformers import LlamaForCausalLM

from qattn_hf import QAttnCache, list_methods, patch, report
from qattn_hf.fidelity.compare import compare
from qattn_hf.reading.texts import read_as
from qattn_hf.recipes.recipe import find_recipes
from qattn_kernels.chip import H200, as_chip
from qattn_kernels.layer.support import unsupported

LONG = random_ids(1, 70)
FEW: dict[str, Any] = dict(do_sample=False, max_new_tokens=3)
UNREAD = "equals full precision and shows no loss"
# methods whose prompts attend to unquantized tokens, as `test_the_warning_is_true` checks
EXACT_PROMPTS = ["kivi", "nf4", "sinkq", "turboquant"]


def said(call: Any) -> list[warnings.WarningMessage]:
    """The warnings of this package that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    texts = (UNREAD, "reference computes", "decodes eagerly", "launch configurations")
    return [w for w in caught if any(text in str(w.message) for text in texts)]


def losses(model: LlamaForCausalLM, n: int = 3) -> None:
    for _ in range(n):
        model(LONG, labels=LONG)


def loop(model: LlamaForCausalLM) -> None:
    for _ in range(5):
        out = model(LONG)
        assert out.logits is not None


WAYS = {
    "labels": losses,
    "use_cache=False": torch.no_grad()(lambda model: model(LONG, use_cache=False)),
    "generate": lambda model: model.generate(LONG, use_cache=False, **FEW),
    "loop": loop,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_result_that_no_code_entered_says_so_once(way: str):
    model = patch(tiny_llama(), "kivi")
    found = said(lambda: WAYS[way](model))
    assert len(found) == 1 and UNREAD in str(found[0].message) and found[0].filename == __file__
    assert "qattn compare" in str(found[0].message)
    assert said(lambda: WAYS[way](model)) == [], "once a patch"
    assert len(said(lambda: WAYS[way](patch(model, "kivi")))) == 1, "and once for the next"


@pytest.mark.parametrize("method", list_methods())
def test_the_warning_is_true(method: str):
    """It comes exactly where the result is full precision's, up to the order of sums and turns of rotated keys."""
    want = tiny_llama(head_dim=32)(LONG).logits
    model = patch(tiny_llama(head_dim=32), method)
    found = said(lambda: model(LONG, labels=LONG))
    exact = (model(LONG).logits - want).abs().max() < 1e-4 * want.std()
    assert bool(found) == (method in EXACT_PROMPTS) == (bool(exact) and method != "none")


@pytest.mark.slow
def test_what_reads_its_codes_or_goes_on_does_not_warn():
    model = patch(tiny_llama(), "kivi")

    def conversations() -> None:
        for _ in range(4):
            model.generate(LONG, **FEW)
            model.generate(LONG, max_new_tokens=1, do_sample=False)
        first = [model(LONG).past_key_values for _ in range(4)]  # all are prefilled before one goes on
        for cache in first:
            model(LONG[:, :3], past_key_values=cache)
        for _ in range(4):
            cache = model(LONG).past_key_values
            model(LONG[:, :3], past_key_values=cache, labels=LONG[:, :3])
        model(LONG, past_key_values=QAttnCache.for_model(model), labels=LONG)
        for _ in range(4):
            model(LONG, use_cache=True)

    assert said(conversations) == []
    for method in ("turbo", "int8", "none"):
        other = patch(tiny_llama(), method)
        assert said(lambda other=other: [way(other) for way in WAYS.values()]) == []


@pytest.mark.slow
def test_caches_that_compiled_steps_read_do_not_warn():
    model = patch(tiny_llama(), "kivi", residual_length=0)
    step = torch.compile(model, backend="eager")

    def conversations() -> None:
        for _ in range(5):
            cache = model(LONG).past_key_values
            step(LONG[:, :1], past_key_values=cache)
            del cache

    assert said(conversations) == []
    assert report(model).to_dict()["unread"] is False


def test_compare_does_not_warn():
    reading = read_as(random_ids(4, 130), steps=4, batch=1)
    assert said(lambda: compare(tiny_llama(), find_recipes(["kivi:residual_length=0"]), reading)) == []


def test_copies_and_pickles_warn_of_their_own():
    model = patch(tiny_llama(), "kivi")
    losses(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert len(said(lambda other=other: losses(other))) == 1


def test_the_report_says_whether_codes_were_read():
    model = patch(tiny_llama(), "kivi", residual_length=0)
    assert report(model).to_dict()["unread"] is None
    cache = model(LONG).past_key_values
    assert report(model).to_dict()["unread"] is True and "no token has read a code yet" in str(report(cache))
    model(LONG[:, :1], past_key_values=cache)
    assert report(model).to_dict()["unread"] is False and "read a code" not in str(report(cache))
    ring = patch(tiny_llama(), "kivi", residual_length=128)
    ring.generate(LONG, **FEW)
    assert report(ring).to_dict()["unread"] is True, "nothing is packed yet"
    for method, found in (("int8", False), ("none", None)):
        other = patch(tiny_llama(), method)
        other(LONG)
        assert report(other).to_dict()["unread"] is found


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, model: LlamaForCausalLM, *args: Any, **settings: Any) -> Any:
    """Patch a model that says that it is on a GPU."""
    with monkeypatch.context() as pretended:
        pretended.setattr(type(model), "device", torch.device("cuda"))
        return patch(model, *args, **settings)


@pytest.mark.parametrize(
    ("settings", "sizes", "part"),
    [
        ({}, {"head_dim": 40}, "head dims are 40"),
        ({"block_kv": 32}, {"head_dim": 64}, "blocks have 32 tokens"),
        ({"layers": {1: {"block_kv": 32}}}, {"head_dim": 64}, "layers 1, "),
    ],
    ids=["head dim", "block", "a layer"],
)
def test_layers_without_kernels_on_a_gpu_are_named(monkeypatch, settings: dict, sizes: dict, part: str):
    model = tiny_llama(**sizes)
    found = said(lambda: on_a_gpu(monkeypatch, model, "turbo", **settings))
    assert len(found) == 1 and part in str(found[0].message) and found[0].filename == __file__
    reason = unsupported(model._qattn.specs[1], 2, sizes["head_dim"], sizes["head_dim"])
    assert reason is not None and reason in str(found[0].message)
    assert said(lambda: on_a_gpu(monkeypatch, model, "turbo", impl="reference", **settings)) == [], "it was asked for"
    assert said(lambda: patch(model, "turbo", **settings)) == [], "on a CPU nothing else computes"


def test_layers_with_kernels_on_a_gpu_warn_of_nothing(monkeypatch):
    assert said(lambda: on_a_gpu(monkeypatch, tiny_llama(head_dim=64), "turbo")) == []


def test_another_gpus_launch_configurations_are_named(monkeypatch):
    name = "NVIDIA GPU of a test"
    with as_chip(H200._replace(name=name)):
        model = tiny_llama(head_dim=64)
        found = said(lambda: on_a_gpu(monkeypatch, model, "turbo"))
        assert len(found) == 1 and f"were measured on {name}: the file of" in str(found[0].message)
        assert found[0].filename == __file__
        reason = report(model).to_dict()["configurations"]
        assert reason in str(found[0].message) and reason in str(report(model))
        assert said(lambda: on_a_gpu(monkeypatch, model, "turbo", impl="reference")) == [], "nothing is launched"
        assert said(lambda: patch(model, "turbo")) == [] and report(model).to_dict()["configurations"] is None


def test_a_decode_that_is_not_captured_says_why_once(fake):
    def hook(module: torch.nn.Module, args: tuple, out: Any) -> None:
        pass

    model = as_on_a_gpu(patch(tiny_llama(), "turbo"))
    handle = model.model.layers[0].register_forward_hook(hook)
    found = said(lambda: [model.generate(IDS, **GREEDY) for _ in range(2)])
    assert [path(model)[1] in str(w.message) for w in found] == [True] and found[0].filename == __file__
    handle.remove()
    assert said(lambda: patch(model, "turbo").generate(IDS, **GREEDY)) == [] and path(model) == ("graph", None)
    with torch.autocast("cpu", torch.bfloat16):
        found = said(lambda: [model.generate(IDS, **GREEDY) for _ in range(2)])
    assert ["autocast is on" in str(w.message) for w in found] == [True]


def test_a_model_that_cannot_be_captured_on_a_gpu_says_why(monkeypatch):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    model = tiny_llama(head_dim=64, rope_parameters=rope)
    found = said(lambda: on_a_gpu(monkeypatch, model, "turbo", impl="reference"))
    assert ["rope scaling is dynamic" in str(w.message) for w in found] == [True] and found[0].filename == __file__
    assert model._qattn.runner.how == "eager" and "rope scaling is dynamic" in str(report(model))
    for layer in model._qattn.specs:
        assert layer.impl == "reference"

    def generate() -> None:
        monkeypatch.setattr(model._qattn, "device_type", "cuda")
        with monkeypatch.context() as unchecked:
            unchecked.setattr("qattn_hf.layer.layer.QAttnLayer._check_device", lambda self, device: None)
            model.generate(IDS, **GREEDY)

    assert said(generate) == [], "patch has said it"


def test_steps_on_a_cpu_and_those_asked_to_be_eager_warn_of_nothing(fake):
    eager = as_on_a_gpu(patch(tiny_llama(), "turbo", decode="eager"))
    assert said(lambda: eager.generate(IDS, **GREEDY)) == []


def test_a_cpu_decodes_without_a_warning():
    model = patch(tiny_llama(), "turbo")
    assert said(lambda: model.generate(IDS, num_beams=2, **FEW)) == []
