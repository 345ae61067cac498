"""Which models can be captured, and the reasons given for others."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from fake_graphs import GREEDY, IDS, as_on_a_gpu, path
from helpers import tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM

from qattn_hf import UnsupportedError, patch
from qattn_hf.generate.cuda_graph import capture


class Waits(torch.nn.Module):
    """A layer that asks the device."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.abs().max().item() < 1e9 else x


@pytest.mark.parametrize("kind", ["waits", "fails"])
def test_a_model_that_cannot_be_captured(fake, kind):
    model, parts = as_on_a_gpu(tiny_llama()), ["_local_scalar_dense" if kind == "waits" else "not permitted"]
    if kind == "waits":
        model.model.layers[1].mlp = Waits(model.model.layers[1].mlp)
    else:
        fake.error = RuntimeError("operation not permitted when stream is capturing\nmore")
    want = patch(model, "turbo", decode="eager").generate(IDS, **GREEDY)
    patch(model, "turbo")
    with pytest.warns(UserWarning, match="cannot be captured") as warned:
        assert torch.equal(model.generate(IDS, **GREEDY), want)
        assert torch.equal(model.generate(IDS, **GREEDY), want)
    assert len([w for w in warned if "qattn_hf" in str(w.message)]) == 1
    decode, reason = path(model)
    assert decode == "eager" and parts[0] in reason and (fake.captured, fake.replayed) == (0, 0)
    patch(model, "turbo", decode="graph")
    with pytest.raises(UnsupportedError, match=parts[0]) as error:
        model.generate(IDS, **GREEDY)
    assert "decode='auto'" in str(error.value) and "\n" not in str(error.value)
    if kind == "waits":  # what was wrong is repaired
        patch(model, "turbo").model.layers[1].mlp = model.model.layers[1].mlp.inner
        assert torch.equal(model.generate(IDS, **GREEDY), want) and path(model) == ("graph", None)


def test_the_watch_finds_what_waits():
    device, x = torch.device("cpu"), torch.arange(6.0)
    quiet = [lambda: x[torch.tensor([1, 2])], lambda: x.masked_fill(x > 2, 0), lambda: torch.where(x > 2, x, 0).sum()]
    quiet += [lambda: x.clone().__setitem__(x > 2, 0)]  # as a split embedding does
    loud = [lambda: x[x > 2], lambda: bool(x.any()), lambda: x.nonzero(), lambda: x.to("meta"), lambda: int(x.max())]
    loud += [lambda: x.clone().__setitem__(x > 2, torch.zeros(3)), lambda: x.view(2, 3)[x[:2] > 0, x[:3] > 1]]
    for call in (*quiet, *loud):
        with capture.SyncWatch(device) as watch:
            call()
        assert bool(watch.waiting_op) == (call in loud)


@contextlib.contextmanager
def pretending_cuda(monkeypatch: pytest.MonkeyPatch, model: Any) -> Any:
    with monkeypatch.context() as patched:
        patched.setattr(type(model), "device", torch.device("cuda"))
        yield


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "num_key_value_heads": 2}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0}


def test_why_a_model_is_not_captured(monkeypatch):
    rope = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
    models = {
        "": tiny_llama(),
        "rope scaling is dynamic": tiny_llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, **rope}),
        "rope scaling is longrope": tiny_llama(rope_parameters={**LONG, **rope}),
        "experts are routed on the host": mixtral("eager"),
        None: mixtral("batched_mm"),
    }
    for part, found in models.items():
        with pretending_cuda(monkeypatch, found):
            reason = capture.why_not(found)
        assert (part or "") in (reason or "") and bool(part) == bool(reason)
    assert capture.why_not(tiny_llama()) == "the model is on the cpu"
    split = tiny_llama()
    split.lm_head.to("meta")
    assert capture.why_not(split) == "its weights are on several devices"
    split = tiny_llama()
    split.hf_device_map = {"model": 0, "lm_head": "disk"}
    assert capture.why_not(split) == "its weights are on several devices"


def mixtral(experts: str) -> Any:
    sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **sizes, **EXPERTS)).eval()
    model.set_experts_implementation(experts)
    return model


def test_a_cpu_decodes_eagerly():
    model = patch(tiny_llama())
    assert path(model) == ("eager", "the model is on the cpu")
    model.generate(IDS, **GREEDY)
    assert path(model) == ("eager", "the model is on the cpu")
    model = patch(model, decode="eager")
    model.generate(IDS, **GREEDY)
    assert path(model) == ("eager", None)
