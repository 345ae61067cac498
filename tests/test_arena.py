"""Arenas that are zeroed together at the end of their allocation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import constants_of, random_ids, tiny_llama

from qattn_hf import QAttnCache, patch
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.methods import get_method
from qattn_kernels.layer import arena


@pytest.fixture(autouse=True)
def dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is allocated without being zeroed holds something."""
    empty = torch.empty

    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(1) if made.dtype == torch.uint8 else made

    monkeypatch.setattr(torch, "empty", filled)


def test_arenas_are_zeroed_when_their_context_ends_however_it_does():
    first = arena.empty_bytes(512, torch.device("cpu"), at_once=False)
    assert not first.any()  # outside of a context at once
    with pytest.raises(MemoryError), arena.zeroed_together():
        later = arena.empty_bytes(512, torch.device("cpu"), at_once=False)
        at_once = arena.empty_bytes(512, torch.device("cpu"), at_once=True)
        assert later.any() and not at_once.any()
        at_once[0] = 7
        raise MemoryError
    assert not later.any() and at_once[0] == 7


def test_layers_of_a_call_are_zeros_before_it_writes(monkeypatch):
    seen = []
    attend = QAttnLayer.attend

    def watched(layer: QAttnLayer, *args: Any, **kwargs: Any) -> Any:
        seen.append(bool(layer.arena.any()))
        return attend(layer, *args, **kwargs)

    monkeypatch.setattr(QAttnLayer, "attend", watched)
    model = patch(tiny_llama(), method="int8")
    with torch.no_grad():
        model(random_ids(1, 5), past_key_values=QAttnCache.for_model(model))
    assert seen == [False, False]


def test_constants_stay_in_arenas_that_are_zeroed_together():
    spec = get_method("sinkq")(rotate_k="hadamard", compensate_k=True).last_layer_spec(2)
    layer, keys = QAttnLayer(spec, 256), torch.zeros(1, 2, 0, 32)
    layer.constants = constants_of(spec)
    with arena.zeroed_together():
        layer.lazy_initialization(keys, keys)
    assert torch.equal(layer.state["k.compensation"], layer.constants["k.compensation"])
