"""Recipes of families: chosen by model type, overridden by the user, reported, and clear about whether they were
measured."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from helpers import random_ids, tiny_llama
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from qattn_hf import QAttnCache, RecipeError, load_recipe, patch, report, unpatch
from qattn_hf.assets import configs_dir
from qattn_hf.cli._common import for_family
from qattn_hf.fidelity.compare import compare
from qattn_hf.fidelity.options import Option
from qattn_hf.fidelity.tuned import recipe_of
from qattn_hf.methods import get_method
from qattn_hf.model.layer_kinds import model_layers
from qattn_hf.reading.chunks import feed
from qattn_hf.reading.texts import read_as
from qattn_hf.recipes import families
from qattn_hf.recipes.recipe import Recipe, find_recipe, find_recipes
from qattn_hf.recipes.spelling import parse_settings
from qattn_kernels.layer.support import unsupported

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
# config values that a small model of a type needs in addition to `SIZES`
SMALL: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16, "sliding_window": 64},
    "gemma3_text": {"head_dim": 16, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
}
# checkpoints of a type that has others without a window, or with one that shows all positions
WINDOWED: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": 512}, "phi3": {"sliding_window": 1023}}
FULL = {model_type: {"sliding_window": None} for model_type in WINDOWED}
TYPES = [model_type for family in families.list_families() for model_type in family.model_types]
SECTIONS = [(t, m) for family in families.list_families() for t in family.model_types for m in family.methods]


def config_of(model_type: str, **changes: Any) -> PretrainedConfig:
    kind = transformers.CONFIG_MAPPING[model_type]
    return kind(**{**SIZES, **SMALL.get(model_type, {"head_dim": 16}), **FULL.get(model_type, {}), **changes})


def tiny(model_type: str, **changes: Any) -> PreTrainedModel:
    """A random model of a type, the same at every call."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(model_type, **changes), dtype=torch.float32).eval()


def family_of(model_type: str) -> families.Family:
    return next(family for family in families.list_families() if model_type in family.model_types)


# The files


def test_every_type_has_one_family():
    assert len(TYPES) == len(set(TYPES))
    wanted = {"llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3_text", "glm", "glm4", "gpt_oss"}
    assert wanted <= set(TYPES)


@pytest.mark.parametrize(("model_type", "method"), SECTIONS)
def test_a_section_is_a_recipe_of_its_method_that_differs_from_the_defaults(model_type: str, method: str):
    found = families.find_family(model_type, method)
    assert found is not None
    given, defaults = found.section.settings, get_method(method)()
    recipe = find_recipe(method, None, {}).for_model(config_of(model_type))
    assert recipe.settings == get_method(method)(**given) and len(recipe.layer_specs(config_of(model_type))) == 2
    assert [key for key, value in given.items() if getattr(defaults, key) == value] == []


@pytest.mark.parametrize(("model_type", "method"), SECTIONS)
def test_a_section_costs_no_kernels(model_type: str, method: str):
    """A layer that kernels compute by the method's defaults they compute by the family's."""

    def reason(recipe: Recipe) -> str | None:
        spec = recipe.settings.layer_spec(1, 2, 8)
        return unsupported(spec, 8, 128, 128)

    recipe = find_recipe(method, None, {})
    assert reason(recipe) or not reason(recipe.for_model(config_of(model_type)))


@pytest.mark.parametrize("model_type", TYPES)
def test_what_waits_has_layers_that_are_not_packed_and_the_rest_is_packed(model_type: str):
    """`waits` of a family goes when the last layer of its checkpoints is packed: then this fails."""
    config = config_of(model_type, **WINDOWED.get(model_type, {}))
    assert (family_of(model_type).waits is not None) == any(model_layers(config))
    model = tiny(model_type)
    for method in family_of(model_type).methods:
        patch(model, method)
        with torch.no_grad():
            assert torch.isfinite(model(random_ids(1, 200)).logits).all()
        assert report(model).to_dict()["packed_tokens"] >= 64


# Who wins, and what is shown


def test_a_family_is_found_by_type_and_method_and_shown():
    model = patch(tiny("qwen2"), "int8")
    with torch.no_grad():
        model(random_ids(1, 100))
    found, text = report(model).to_dict(), str(report(model))
    assert found["recipe"]["smooth_k"] is True
    assert found["recipe_origin"] == "defaults of int8 for qwen2, unmeasured"
    family = found["recipe_family"]
    assert family["settings"] == {"smooth_k": True} and family["measured"] is None
    assert family["why"] and family["source"]
    assert "int8 (defaults of int8 for qwen2, unmeasured)" in text
    assert "the model's family: smooth_k=True. The scale of a token" in text
    assert "around a mean" in text  # what is packed, not only what is said
    assert report(QAttnCache.for_model(unpatch(model), "int8")).to_dict()["recipe"]["smooth_k"] is True


def test_an_advice_is_shown_where_the_defaults_stand():
    model = patch(tiny("qwen2"), "turbo")
    assert report(model).to_dict()["recipe"] == find_recipe("turbo", None, {}).settings.model_dump()
    assert "the model's family: Use 8-bit keys with their mean subtracted" in str(report(model))
    assert "the model's family" not in str(report(patch(tiny("llama"), "turbo")))


def test_a_measured_section_says_where(monkeypatch: pytest.MonkeyPatch):
    section = families.Section(settings={"bits": 2}, why="why", source="source", measured="quality-x.json")
    family = families.Family(family="L", model_types=["llama"], methods={"turbo": section})
    monkeypatch.setattr(families, "list_families", lambda: (family,))
    found = report(patch(tiny_llama(), "turbo")).to_dict()
    assert found["recipe_origin"] == "defaults of turbo for llama, measured in quality-x.json"


@pytest.mark.parametrize("family", families.list_families(), ids=lambda family: family.model_types[0])
def test_each_file_says_whether_its_family_was_measured(family: families.Family):
    """In its first lines, as its sections do."""
    texts = {path: path.read_text(encoding="utf-8") for path in (configs_dir() / "families").glob("*.yaml")}
    (text,) = [text for text in texts.values() if f"\nfamily: {family.family}\n" in text]
    records = {section.measured for section in family.methods.values()}
    head = text.partition("\nfamily:")[0]
    said = set(re.findall(r"`(released-[\w-]+\.json)`", head)) or {None}
    assert said == records and ("Not measured" in head) == (records == {None})


@pytest.mark.parametrize("family", families.list_families(), ids=lambda family: family.model_types[0])
def test_what_is_called_measured_was(family: families.Family, request: pytest.FixtureRequest):
    results = request.config.rootpath / "eval" / "results"
    missing = [s.measured for s in family.methods.values() if s.measured and not (results / s.measured).is_file()]
    assert missing == []


def test_settings_of_the_user_win():
    model = tiny("qwen2")
    given = report(patch(model, "kivi", k_bits=2, v_bits=4)).to_dict()
    assert (given["recipe"]["k_bits"], given["recipe"]["v_bits"]) == (2, 4)
    assert given["recipe_origin"] == "defaults of kivi with k_bits=2, v_bits=4 for qwen2, unmeasured"
    assert "the model's family" not in str(report(model)), "nothing of it is left"
    assert report(patch(model, "kivi", v_bits=4)).to_dict()["recipe"]["k_bits"] == 4
    layers = {"0": {"k_bits": 2}, "1": {"method": "int8"}}
    specs = patch(model, "kivi", layers=layers)._qattn.specs
    assert (specs[0].k.bits, specs[0].v.bits) == (2, 2)
    assert specs[1].k.name == "int8", "a layer's other method has its own defaults"


def test_bits_of_the_user_win_over_k_bits_of_the_family(capsys: pytest.CaptureFixture):
    model = patch(tiny("qwen2"), "kivi", bits=2, residual_length=0)
    with torch.no_grad():
        model(random_ids(1, 100))
    found = report(model).to_dict()
    assert {str(row["bits_per_head"]) for row in found["layers"]} == {"{'k': [[2, 2]], 'v': [[2, 2]]}"}
    assert found["recipe"]["k_bits"] is None and found["recipe_family"]["settings"] == {}
    assert "the model's family" not in str(report(model))
    asked = find_recipes(["kivi:bits=2", "kivi:bits=2,family=false", "kivi:v_bits=2"])
    bits, plain, narrow = compare(tiny("qwen2"), asked, read_as(random_ids(1, 200), steps=2), at_tokens=256)
    assert bits["recipe"] == {"method": "kivi", "bits": 2} and bits["kl"] == plain["kl"]
    assert bits["effective_bits"] == plain["effective_bits"] < narrow["effective_bits"]
    for_family(asked["kivi:bits=2"], tiny("qwen2"))
    assert capsys.readouterr().err == ""


def test_a_recipe_has_no_settings_of_the_family():
    found = report(patch(tiny("phi3"), "sage1")).to_dict()
    assert found["recipe"]["smooth_v"] is False and found["recipe_family"] is None


def test_what_the_user_gave_too_is_not_called_the_familys(capsys: pytest.CaptureFixture):
    recipe = patch(tiny("qwen2"), "int8")._qattn.recipe
    for model in (patch(tiny("qwen2"), "int8", smooth_k=True), patch(tiny("qwen2"), recipe=recipe, smooth_k=True)):
        assert "the model's family" not in str(report(model))
    for_family(find_recipe("int8", None, {"smooth_k": True}), tiny("qwen2"))
    assert capsys.readouterr().err == ""


def test_less_than_a_measured_section_is_not_called_measured(monkeypatch: pytest.MonkeyPatch):
    section = families.Section(settings={"k_bits": 2, "n_h": None}, why="why", source="source", measured="x.json")
    family = families.Family(family="L", model_types=["llama"], methods={"turbo": section})
    monkeypatch.setattr(families, "list_families", lambda: (family,))
    found = report(patch(tiny_llama(), "turbo", bits=4)).to_dict()
    assert found["recipe_origin"] == "defaults of turbo with bits=4 for llama, unmeasured"
    assert found["recipe_family"]["measured"] is None and found["recipe_family"]["settings"] == {"n_h": None}


def test_what_clashes_with_a_family_is_refused_with_the_way_out():
    model = tiny("phi3")
    with pytest.raises(RecipeError, match=r"smooth_v clashes with pv='model'.*smooth_v=True is the family's.*family="):
        patch(model, "sage2", pv="model")
    assert patch(model, "sage2", pv="model", smooth_v=False)._qattn.recipe.settings.pv == "model"
    assert patch(model, "sage2", pv="model", family=False)._qattn.recipe.settings.pv == "model"


@pytest.mark.parametrize(
    "how", [{"method": "int8", "family": False}, {"recipe": "int8"}, {"recipe": load_recipe("int8")}], ids=str
)
def test_family_false_or_a_named_recipe_leaves_the_family_out(how: dict[str, Any]):
    found = report(patch(tiny("qwen2"), **how)).to_dict()
    assert found["recipe"]["smooth_k"] is False and found["recipe_family"] is None
    assert "qwen2" not in found["recipe_origin"]


def test_a_file_may_ask_for_the_family(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("method: kivi\nv_bits: 4\nfamily: true\n", encoding="utf-8")
    recipe = patch(tiny("qwen2"), recipe=path)._qattn.recipe
    assert (recipe.settings.k_bits, recipe.settings.v_bits) == (4, 4)
    path.write_text("method: kivi\nfamily: qwen2\n", encoding="utf-8")
    with pytest.raises(RecipeError, match="family = 'qwen2': give true or false"):
        load_recipe(path)


def test_unknown_types_and_methods_without_a_section_are_as_before():
    for model, method in ((tiny("gemma"), "int8"), (tiny("llama"), "int8")):
        found = report(patch(model, method)).to_dict()
        assert found["recipe"] == get_method(method)().model_dump()
        assert found["recipe_origin"] == "defaults of int8" and found["recipe_family"] is None


def test_a_recipe_keeps_what_its_first_model_made_of_it(tmp_path):
    """Written to a file, given to another model or changed: it is what was patched, not looked up anew."""
    recipe = patch(tiny("qwen2"), "kivi", v_bits=4)._qattn.recipe
    path = tmp_path / "kept.yaml"
    path.write_text(recipe.as_yaml(), encoding="utf-8")
    assert load_recipe(path).settings == recipe.settings
    assert patch(tiny_llama(), recipe=recipe)._qattn.recipe.settings.k_bits == 4
    assert find_recipe(None, recipe, {"v_bits": 2}).settings.k_bits == 4
    unused = find_recipe(None, find_recipe("kivi", None, {"family": False}), {"v_bits": 4})
    assert unused.for_model(config_of("qwen2")).settings.k_bits is None


def test_a_tuned_recipe_is_what_was_measured():
    made = recipe_of(
        [Option(layer, "int8", (), (), 0, 0.0) for layer in range(2)], {"int8": find_recipe("int8", None, {})}, 2
    )
    assert not patch(tiny("qwen2"), recipe=made)._qattn.recipe.settings.smooth_k


def test_commands_tell_what_a_family_changes(capsys: pytest.CaptureFixture):
    model = tiny("qwen2")
    found = for_family(find_recipe("int8", None, {}), model)
    assert found.settings.smooth_k
    assert capsys.readouterr().err == "int8 has smooth_k=True for qwen2, unmeasured; family=false leaves it out\n"
    off = for_family(find_recipe("int8", None, parse_settings(["family=false"])), model)
    assert not off.settings.smooth_k and for_family(find_recipe("turbo", None, {}), model).family
    assert capsys.readouterr().err == ""


# Their purpose. Biases are in channels of 64 that RoPE turns by less than a hundredth in 256 tokens, or never.

CHANNELS = {"qwen2": [28, 30, 60, 63], "glm": [40, 50, 60, 63]}


def biased(model_type: str, bias: float) -> PreTrainedModel:
    """Make a model with one large key bias in a few channels, as in Qwen2.5."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.1}
    theta = {"rope_theta": 1e6} if model_type == "qwen2" else {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    rope = {"rope_type": "default", **theta}
    model = tiny(model_type, **sizes, head_dim=64, rope_parameters=rope, attention_bias=True)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.k_proj.bias)
        layer.self_attn.k_proj.bias.data[CHANNELS[model_type]] = bias
    return model


def kl(bias: float, method: str, model_type: str = "qwen2", **settings: Any) -> float:
    """Return the KL to full precision, in nats per token, of the last 32 tokens, read in one call after the packed
    ones."""
    found = []
    for packed in (False, True):
        model = biased(model_type, bias)
        chunks = feed(patch(model, method, **settings) if packed else model, random_ids(2, 256), [0, 224, 256])
        found.append([chunk.logits for chunk in chunks][-1].log_softmax(-1))
    full, read = found
    return float((full.exp() * (full - read)).sum(-1).mean())


def test_large_biases_of_keys_break_naive_4_bit_keys_and_not_the_familys_8_bit_ones():
    naive = {"k_format": "turbo4"}
    assert kl(50, "turboquant", **naive) > 10 * kl(0, "turboquant", **naive)
    assert kl(50, "turboquant", **naive) > 10 * kl(50, "turboquant")


@pytest.mark.parametrize("method", ["int8", "int_flash"])
@pytest.mark.parametrize("bias", [50, 200])
@pytest.mark.parametrize("model_type", CHANNELS)
def test_around_their_mean_keys_with_large_biases_err_ten_times_less(model_type: str, method: str, bias: float):
    assert 10 * kl(bias, method, model_type) < kl(bias, method, model_type, family=False)


@pytest.mark.parametrize("method", ["turbo", "fp8"])
@pytest.mark.parametrize("advised", ["int8", "sage2"])
def test_what_is_advised_in_place_of_a_method_errs_ten_times_less(method: str, advised: str):
    assert 10 * kl(50, advised) < kl(50, method)


def test_no_setting_of_turbo_would_have_helped():
    assert kl(50, "turbo", smooth_k=True) > kl(50, "turbo") / 2
