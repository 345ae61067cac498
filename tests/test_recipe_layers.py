"""Recipes with different settings for some layers: scope, refusals, and caches that run with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_llama

from qattn_hf import QAttnCache, RecipeError, list_methods, load_recipe, patch, report
from qattn_hf.methods import get_method
from qattn_hf.reading.chunks import cuts, feed
from qattn_hf.recipes.recipe import find_recipe

LAYERS = {
    "0": {"k_bits": "mixed", "k_low_heads": [[1], [], []]},
    "2": {"method": "kivi", "bits": 4, "group_size": 128},
}
MIXED: dict[str, Any] = {"v_bits": 2, "softmax": "sas", "layers": LAYERS}


def mixed_model(**settings: Any) -> Any:
    return patch(tiny_llama(num_hidden_layers=3), method="turbo", **{**MIXED, **settings})


def test_each_layer_has_its_own_settings_and_the_report_says_so():
    model = mixed_model()
    model.generate(random_ids(1, 300), max_new_tokens=8, do_sample=False)
    found = report(model).to_dict()
    assert [row["method"] for row in found["layers"]] == ["turbo", "turbo", "kivi"]
    assert [row["bits_per_head"] for row in found["layers"]] == [
        {"k": [[4, 2]], "v": [[2, 2]]},
        {"k": [[4, 4]], "v": [[2, 2]]},
        {"k": [[4, 4]], "v": [[4, 4]]},
    ]
    assert found["recipe_layers"] == LAYERS and found["method"] == "turbo"
    assert found["packed_tokens"] == min(row["packed_tokens"] for row in found["layers"]) == 128
    text = str(report(model))
    assert "turbo and kivi" in text and "flashq 42" in text and "kivi 4" in text


def test_what_holds_in_a_layer():
    """Settings of every method hold in all layers, a method's own only where it is."""
    recipe = find_recipe("turbo", None, {**MIXED, "impl": "reference"})
    assert recipe.settings_of(0).v_bits == recipe.settings_of(1).v_bits == 2
    assert recipe.settings_of(2).group_size == 128 and recipe.settings_of(2).residual_length == 128
    assert {recipe.settings_of(i).softmax for i in range(3)} == {"sas"}
    assert {recipe.settings_of(i).impl for i in range(3)} == {"reference"}
    changed = find_recipe(None, recipe, {"v_bits": 4})  # an override moves the layers that build on it as well
    assert changed.settings_of(0).v_bits == 4 and changed.settings_of(2).bits == 4


NARROW: dict[str, Any] = {"k_bits": 4, "v_bits": 4, "prefill_compute": "model", "decode_compute": "model"}


@pytest.mark.parametrize("v_bits", [{}, {"v_bits": 4}], ids=str)
def test_what_is_set_for_all_wins_over_what_others_set_for_a_part(tmp_path: Path, v_bits: dict[str, int]):
    """On top of a recipe, of a file, and in a layer."""
    given: dict[str, Any] = {"bits": 2, "compute": "int8", **v_bits}
    path = tmp_path / "narrow.yaml"
    path.write_text(find_recipe("turbo", None, NARROW).as_yaml(), encoding="utf-8")
    found = [
        patch(tiny_llama(), recipe=find_recipe("turbo", None, NARROW), **given)._qattn.specs[0],
        patch(tiny_llama(), recipe=path, **given)._qattn.specs[0],
        patch(tiny_llama(), "turbo", **NARROW, layers={"1": given})._qattn.specs[1],
    ]
    assert [(s.k.bits, s.v.bits) for s in found] == [(2, given.get("v_bits", 2))] * 3
    assert [(s.compute.prefill, s.compute.decode) for s in found] == [("int8", "int8")] * 3
    kept = find_recipe(None, find_recipe("turbo", None, {**NARROW, "layers": {"1": given}}), {"compute": None})
    assert (kept.settings.k_bits, kept.settings.decode_compute) == (4, "model"), "null sets nothing for all"


def test_a_layer_of_another_method_takes_no_part_that_it_sets_for_all():
    layers = {"1": {"method": "int8", "compute": "int8"}}
    spec = patch(tiny_llama(), "kivi", decode_compute="model", layers=layers)._qattn.specs[1]
    assert (spec.compute.prefill, spec.compute.decode) == ("int8", "int8")


def test_settings_of_a_part_are_found_by_their_names():
    methods = [get_method(name) for name in list_methods()]
    found = {(key, part) for method in methods for key in method.model_fields for part in method.covered(key, 2)}
    assert found == {
        ("bits", "k_bits"),
        ("bits", "v_bits"),
        ("compute", "prefill_compute"),
        ("compute", "decode_compute"),
    }


def test_layers_alone_are_what_they_are_in_a_uniform_recipe():
    """A layer's state depends only on its settings and input: the first layer's equals that of a uniform recipe."""
    ids = random_ids(2, 150)
    states = []
    for settings in (MIXED, {"v_bits": 2, "softmax": "sas", "k_bits": "mixed", "k_low_heads": [[1], [1], [1]]}):
        model = patch(tiny_llama(num_hidden_layers=3), method="turbo", **settings)
        *_, last = feed(model, ids, cuts(150, 61, 4))
        states.append(last.cache.layers[0].state)
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_file_gives_back_what_was_written(tmp_path: Path):
    recipe = find_recipe("turbo", None, MIXED)
    path = tmp_path / "mixed.yaml"
    path.write_text(recipe.as_yaml(), encoding="utf-8")
    read = load_recipe(path)
    assert (read.settings, read.choices, read.method) == (recipe.settings, recipe.choices, "turbo")
    model = patch(tiny_llama(num_hidden_layers=3), recipe=str(path))
    assert [s.k.name for s in model._qattn.specs] == ["flashq", "flashq", "kivi"]


def test_layers_are_written_as_numbers_ranges_or_several(tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text("method: int8\nlayers:\n  0: {method: fp8}\n  2-3,6: {method: turbo, bits: 2}\n")
    recipe = load_recipe(path)
    assert [recipe.settings_of(i).name() for i in range(8)] == [
        "fp8", "int8", "turbo", "turbo", "int8", "int8", "turbo", "int8",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"layers": {"0-9": {}}}, "layers 0-9: the model has layers 0 to 2"),
        ({"layers": {"0": {}, "0-1": {}}}, "layer 0 is under 0 too"),
        ({"layers": {"x": {}}}, "such as 0-3,7"),
        ({"layers": {"3-1": {}}}, "such as 0-3,7"),
        ({"layers": {"0-4096": {}}}, "layer 4096; layers are 0 to 4095 at most"),
        ({"layers": {"0": {1: 2}}}, "layers 0: keys are names, not 1"),
        ({"layers": {"-1": {}}}, "such as 0-3,7"),
        ({"layers": [1]}, "give settings by layers"),
        ({"layers": {"0": 4}}, "give settings by layers"),
        ({"layers": {"0": {"decode": "eager"}}}, "decode applies to all layers"),
        ({"layers": {"0": {"crop_horizon": 128}}}, "crop_horizon applies to all layers"),
        ({"layers": {"0": {"bitz": 2}}}, "layers 0: unknown key 'bitz', did you mean 'bits'"),
        ({"layers": {"0": {"bits": 3}}}, "layers 0: bits = 3"),
        ({"layers": {"0": {"method": "kivy"}}}, "did you mean 'kivi'"),
        ({"layers": {"0": {"method": 4}}}, "method = 4"),
        ({"layers": {"0": {"method": "sage2", "cache": "model"}}}, "take cache='quantized'"),
        ({"layers": {"0": {"bits": "mixed", "k_low_heads": [[7], [0], [0]]}}}, "heads are 0 to 1"),
        ({"layer": {}}, "unknown key 'layer'"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_the_model_alone(settings: dict[str, Any], said: str):
    model = tiny_llama(num_hidden_layers=3)
    with pytest.raises(RecipeError) as raised:
        patch(model, method="turbo", **settings)
    assert said in str(raised.value)
    assert not hasattr(model, "_qattn")


def test_generate_crop_and_reorder_work_across_layers_of_other_windows():
    model = mixed_model()
    ids = random_ids(2, 200)
    greedy = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert model.generate(ids, max_new_tokens=12, num_beams=2, do_sample=False).shape == greedy.shape
    *_, last = feed(model, ids, cuts(200, 61))
    cache: QAttnCache = last.cache
    *_, more = feed(model, ids[:, :20], [0, 20], cache=cache)
    wanted = more.logits
    cache.crop(-20)
    *_, again = feed(model, ids[:, :20], [0, 20], cache=cache)
    assert torch.equal(again.logits, wanted)


def test_the_memory_of_a_mixed_cache_serves_the_next_call():
    """Blocks of 64 and of 128 tokens: capacities differ in blocks, and the arenas are still taken again."""
    model = mixed_model()
    ids = random_ids(1, 200)
    first = model.generate(ids, max_new_tokens=8, do_sample=False)
    layers = [id(layer) for layer in model._qattn.last.cache.layers]
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False), first)
    assert [id(layer) for layer in model._qattn.last.cache.layers] == layers
    longer = model.generate(random_ids(1, 500), max_new_tokens=8, do_sample=False)
    assert longer.shape == (1, 508)
