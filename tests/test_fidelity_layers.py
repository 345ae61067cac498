"""`compare` and `inspect` of models some of whose layers are their own: packed layers are seen, the others are kept."""

from __future__ import annotations

import pytest
import torch
from helpers import random_ids
from small_types import PACKED, tiny

from qattn_hf import patch, report
from qattn_hf.attention.observe import Call, observed
from qattn_hf.errors import UnsupportedError
from qattn_hf.fidelity.compare import compare
from qattn_hf.fidelity.inspection import inspect
from qattn_hf.fidelity.tables import print_table
from qattn_hf.fidelity.tune import Budget, tune
from qattn_hf.reading.texts import read_as
from qattn_hf.recipes.recipe import find_recipes

TOKENS = 150  # past the window of 20, and past two blocks
MIXED = ["gpt_oss", "gemma2", "llama4_text", "qwen3_next", "falcon_h1", "gemma4_text"]  # kinds of layers


@pytest.mark.parametrize("family", MIXED)
def test_calls_of_packed_layers_are_observed_and_the_model_computes_as_before(family: str):
    model, ids, calls = tiny(family), random_ids(2, TOKENS), list[Call]()
    want = model(ids).logits
    with observed(model, calls.append):
        got = model(ids).logits
    assert [call.layer for call in calls] == [i for i, packed in enumerate(PACKED[family]) if packed]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)  # fp32 sums in another order
    assert torch.equal(model(ids).logits, want)


@pytest.mark.parametrize("family", [pytest.param(t, marks=() if t in MIXED[:2] else pytest.mark.slow) for t in MIXED])
def test_compare_and_inspect_name_the_packed_layers(family: str, capsys):
    model, ids = tiny(family), random_ids(2, TOKENS)
    packed = [i for i, packed in enumerate(PACKED[family]) if packed]
    exact, coarse = compare(model, find_recipes(["none", "turbo:bits=2"]), read_as(ids, steps=2))
    for row in (exact, coarse):
        assert [layer["layer"] for layer in row["layers"]] == packed
        assert row["own_layers"] == len(PACKED[family]) - len(packed)
    assert exact["kl"] < 1e-6 and 32 <= exact["effective_bits"] < 33  # kept in fp32, as the model is
    worst = {row["method"]: row["attention"]["worst"]["relative_l1"] for row in (exact, coarse)}
    assert worst["none"] < 1e-5 < 1e-2 < worst["turbo:bits=2"]  # 2 bits of random values err by more than 1 %
    print_table([{"model": family, **row} for row in (exact, coarse)])
    assert ("layers are not packed" in capsys.readouterr().out) == bool(exact["own_layers"])
    recipe = find_recipes(["turbo"])["turbo"]
    assert [found.layer for found in inspect(model, recipe, ids[:1])] == packed


@pytest.mark.parametrize("family", ["gemma2", pytest.param("gemma4_text", marks=pytest.mark.slow), "falcon_h1"])
def test_tune_chooses_for_packed_layers(family: str):
    """Heads and settings are chosen only for packed layers.

    `patch` takes the recipe, and other layers stay unpacked.
    """
    model, ids = tiny(family), random_ids(4, TOKENS)
    packed = [i for i, packed in enumerate(PACKED[family]) if packed]
    candidates = find_recipes(["turbo:bits=mixed", "int8"])
    found = tune(model, candidates, read_as(ids[:2]), read_as(ids[2:]), Budget(bits=12.0, at_tokens=512))
    assert [option.layer for option in found.chosen] == packed
    assert {row["layer"] for row in found.trials} == set(packed)
    assert found.checked[0]["effective_bits_total"] <= 12.0
    rows = report(patch(model, recipe=found.recipe)(ids).past_key_values).to_dict()["layers"]
    assert [row["method"] != "model" for row in rows] == [i in packed for i in range(len(rows))]


@pytest.mark.parametrize("family", ["gemma2", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_compare_measures_packed_windows(family: str):
    """Windows are measured layer by layer and end to end, past the window.

    Their bytes are those of the ring, for any context.
    """
    model, reading = tiny(family), read_as(random_ids(2, TOKENS), steps=3)
    names = ["none:sliding=packed", "turbo:bits=2,sliding=packed", "turbo:bits=2"]
    exact, coarse, own = compare(model, find_recipes(names), reading, at_tokens=1024)
    packed = [i for i, packed in enumerate(PACKED[family]) if packed]
    assert [layer["layer"] for layer in own["layers"]] == packed
    for row in (exact, coarse):
        assert [layer["layer"] for layer in row["layers"]] == list(range(len(PACKED[family])))
    assert exact["kl"] < 1e-6 < coarse["kl"] and exact["attention"]["worst"]["relative_l1"] < 1e-5
    longer = compare(model, find_recipes(names[1:]), reading, at_tokens=2048)
    grown = [more["kv_bytes"] - row["kv_bytes"] for more, row in zip(longer, (coarse, own), strict=True)]
    assert grown[0] == grown[1] > 0


def test_tune_and_inspect_refuse_packed_windows():
    model, reading = tiny("gemma2"), read_as(random_ids(1, TOKENS))
    recipes = find_recipes(["turbo:sliding=packed"])
    for call in (
        lambda: tune(model, recipes, reading, reading, Budget(bits=12.0)),
        lambda: inspect(model, next(iter(recipes.values())), reading.ids),
    ):
        with pytest.raises(UnsupportedError, match="packed sliding windows cannot be observed here: use sliding='ex"):
            call()


def test_a_model_without_packed_layers_is_refused():
    with pytest.raises(UnsupportedError, match="no layer can be packed"):
        compare(tiny("mistral"), find_recipes(["turbo"]), read_as(random_ids(1, TOKENS)))
