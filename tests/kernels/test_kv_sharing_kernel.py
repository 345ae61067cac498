"""Layers that read an earlier layer's keys and values, in Triton: results equal those of layers with separate
caches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import DEVICE, Case, case_id, make_layer, random_qkv
from test_kv_sharing import check_readers
from test_window_layer import windowed

from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.layer.scores import Scores
from qattn_kernels.step import prompt

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison", "no_grad")]
DIM = 64
KIVI: Case = ("kivi", {"group_size": 64, "residual_length": 64})
# The interpreter is slow, and what methods and windows do here is the host's, which the reference shows too.
METHODS: list[Case] = [("turbo", {"bits": "mixed"})]
METHODS += [("int8", {}), KIVI, ("sinkq", {"group_size": 64, "sink_skip_layers": 0})] if DEVICE == "cuda" else []


def layers(case: Case, window: int = 0) -> tuple[QAttnLayer, ...]:
    """A layer that is read, one alone, and one for a reader."""
    found = [windowed(case, window) if window else make_layer(case, None) for _ in range(3)]
    for layer in found:
        layer.spec = replace(layer.spec, impl="triton")
    return tuple(found)


@pytest.mark.slow
@pytest.mark.parametrize("case", METHODS, ids=case_id)
def test_readers(case: Case):
    """A padded prompt, steps (the second has a launch plan), a few tokens, and a later prompt."""
    calls = (78, 1, 1, 3, 60)
    layer, alone, other = layers(case)
    check_readers(layer, alone, [other], [x.to(DEVICE) for x in random_qkv(1, sum(calls), dim=DIM)], calls)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter takes half a minute")
def test_readers_of_a_window():
    """With a prompt for which the layer has no room."""
    calls = (70, 1, 330, 20)
    layer, alone, other = layers(("turbo", {}), 21)
    check_readers(layer, alone, [other], [x.to(DEVICE) for x in random_qkv(2, sum(calls), dim=DIM)], calls)


@pytest.mark.slow
@pytest.mark.parametrize("finite", [True, False], ids=["finite", "a key that is not"])
def test_readers_of_a_prompt_that_sdpa_computes(finite: bool, monkeypatch: pytest.MonkeyPatch):
    """Also with the last queries alone, as Gemma 4 gives them. What is not finite is masked, which kernels do."""
    monkeypatch.setattr(prompt, "WORTH", 0)
    monkeypatch.setattr(prompt, "_fast", lambda *qkv: True)  # whichever backend takes fp32
    layer, alone, other = layers(KIVI)
    q, k, v = (x.to(DEVICE) for x in random_qkv(2, 67, dim=DIM))
    k[1, 1, 40, 3] = 1.0 if finite else float("nan")
    check_readers(layer, alone, [other], (q, k, v), (66, 1))
    assert layer.prompt_by == "sdpa"
    handle, span = alone.update(k, v)[0], torch.tensor([[0, 67]] * 2, dtype=torch.int32, device=DEVICE)
    alone.reset()
    alone.shared = True
    whole, *parts = (alone.attend(q[:, :, -n:], handle, span, Scores(0.125), unpadded=True)[0] for n in (67, 1, 3))
    for part in parts:
        torch.testing.assert_close(part, whole[:, :, -part.shape[2] :], rtol=0, atol=1e-5)  # fp32 sums in another order


def test_readers_of_a_prompt_over_codes(monkeypatch: pytest.MonkeyPatch):
    """The layer that writes the codes attends with SDPA to their dequantized values, and its readers with kernels."""
    monkeypatch.setattr(prompt, "WORTH", 0)
    monkeypatch.setattr(prompt, "_fast", lambda *qkv: True)
    layer, *_ = layers(("int8", {"prefill_compute": "model"}))
    layer.shared = True
    q, k, v = (x.to(DEVICE) for x in random_qkv(1, 67, dim=DIM))
    handle, span = layer.update(k, v)[0], torch.tensor([[0, 67]], dtype=torch.int32, device=DEVICE)
    own, reader = (layer.attend(q, handle, span, Scores(0.125), unpadded=True)[0] for _ in range(2))
    assert layer.prompt_by == "sdpa"
    torch.testing.assert_close(reader, own, rtol=0, atol=1e-5)  # fp32 sums in another order
