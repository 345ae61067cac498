"""Arenas that are zeroed together when their allocation ends, and specs, by which what is known of them is found."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from helpers import make_layer, random_ids, shares_of, tiny_llama

from qattn_hf import QAttnCache, patch
from qattn_hf.layer import QAttnLayer
from qattn_hf.methods import get_method
from qattn_kernels.layer import arena
from qattn_kernels.layout import Geometry


@pytest.fixture(autouse=True)
def dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is allocated without being zeroed holds something."""
    empty = torch.empty

    def filled(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(1) if made.dtype == torch.uint8 else made

    monkeypatch.setattr(torch, "empty", filled)


def layout() -> arena.Layout:
    return arena.Layout(Geometry(1, 2, 16, 16, 1, torch.float32), make_layer(("int8", {})).spec)


def test_arenas_are_zeroed_when_their_context_ends_however_it_does():
    first = arena.empty_arena(layout(), torch.device("cpu"), at_once=False)
    assert not first.any()  # outside of a context at once
    with pytest.raises(MemoryError), arena.zeroed_together():
        later = arena.empty_arena(layout(), torch.device("cpu"), at_once=False)
        at_once = arena.empty_arena(layout(), torch.device("cpu"))
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
    layer.constants = shares_of(spec)
    with arena.zeroed_together():
        layer.lazy_initialization(keys, keys)
    assert torch.equal(layer.state["k.compensation"], layer.constants["k.compensation"])


def test_layers_alike_share_a_spec_whose_pickle_has_no_hash():
    """A hash of strings is another one in another process."""
    specs = patch(tiny_llama(), method="turbo")._qattn.specs
    assert len(specs) > 1 and all(spec is specs[0] for spec in specs)
    loaded = [pickle.loads(pickle.dumps(spec)) for spec in (specs[0], dataclasses.replace(specs[0]))]
    assert [set(vars(spec)) for spec in loaded] == [{field.name for field in dataclasses.fields(specs[0])}] * 2
    assert loaded[0] == loaded[1] == specs[0] and hash(loaded[0]) == hash(specs[0])
