"""`patch(model, bits=3.5)` and `patch(model, kl=0.01)`: the model chooses its setting and says why."""

from __future__ import annotations

import copy
import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_llama
from small_types import tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from qattn_hf import QAttnError, RecipeError, UnsupportedError, patch, report, unpatch
from qattn_hf.assets import demo_model_dir
from qattn_hf.choosing import text
from qattn_hf.choosing.candidates import candidates
from qattn_hf.choosing.reasons import features
from qattn_hf.model.decoder import decoder_of
from qattn_hf.recipes.chosen import Chosen
from qattn_kernels.layer.spec import SHORT_CALL

probe = import_module("qattn_hf.choosing.probe")


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    """A third of the tokens that a probe reads otherwise."""
    monkeypatch.setattr(text, "TOKENS", 400)


@pytest.fixture
def few(monkeypatch):
    """A third of the candidates, for tests that measure weights for themselves alone."""
    choose = import_module("qattn_hf.choosing.choose")
    monkeypatch.setattr(choose, "candidates", lambda *given: candidates(*given)[::3])


@pytest.fixture
def nothing_known(monkeypatch, few):
    """For tests that count what is measured. The others take what earlier ones measured of the same weights."""
    monkeypatch.setattr(probe, "_known", {})


@pytest.fixture
def probe_fails(monkeypatch, nothing_known):
    """Asks a model for a choice whose probe fails."""

    def fail(*_: Any) -> Any:
        raise QAttnError("planted")

    def ask(model: PreTrainedModel) -> None:
        monkeypatch.setattr(probe, "token_losses", fail)
        with pytest.raises(QAttnError, match="planted"):
            patch(model, bits=3.5)

    return ask


def noisy_llama(**changes: Any) -> PreTrainedModel:
    """Weights large enough that what codes lose shows in the logits."""
    return tiny_llama(**{"initializer_range": 0.15, **changes})


def stretched_llama() -> PreTrainedModel:
    """One in eight key channels is twenty times as large as the others."""
    model = tiny_llama(initializer_range=0.3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight[3::8].mul_(20)
    return model


def chosen(model: PreTrainedModel, **budget: Any) -> Chosen:
    found = patch(model, **budget)._qattn.recipe.chosen
    unpatch(model)
    return found


def calls_of(model: PreTrainedModel) -> list[int]:
    """A list that grows by one with each call of the decoder."""
    calls: list[int] = []
    decoder_of(model).register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2.5, 3.5, 4.5])
def test_bits_are_met_as_a_report_counts_them(bits: float):
    model = patch(noisy_llama(), bits=bits)
    model(random_ids(1, 400))
    data = report(model).to_dict()
    assert data["effective_bits"] == pytest.approx(data["chosen"]["setting_bits"], rel=1e-6)
    assert data["effective_bits"] <= bits
    assert data["chosen"]["setting_kl"] <= 1.05 * min(one["kl"] for one in data["chosen"]["tried"])


@pytest.mark.slow
def test_more_bits_lose_less():
    model = noisy_llama()
    few, more = chosen(model, bits=2.5), chosen(model, bits=4.5)
    assert more.setting_kl < few.setting_kl / 5


def test_a_kl_gets_the_fewest_bits_that_keep_it():
    model = noisy_llama()
    found = chosen(model, kl=0.05)
    assert found.setting_kl <= 0.05 and all(one.bits > found.setting_bits - 0.01 for one in found.tried)
    assert chosen(model, kl=0.2).setting_bits < found.setting_bits


def test_the_choice_is_the_same_when_it_is_made_again(monkeypatch, nothing_known):
    first = chosen(noisy_llama(), bits=3.5)
    monkeypatch.setattr(probe, "_known", {})
    again = chosen(noisy_llama(), bits=3.5)
    assert again.tried == first.tried and again.setting == first.setting and again.facts == first.facts


def test_weights_are_probed_once_and_other_weights_anew(nothing_known):
    model = noisy_llama()
    calls = calls_of(model)
    found = chosen(model, bits=3.5)
    settings = len(found.tried)
    # eight passes that sample, one for facts, two readings a group of settings, two for constants
    assert found.forwards <= len(calls) <= found.forwards + 2  # patch's own, for constants of the recipe
    calls_of_a_row = 1 + probe.SCORED // SHORT_CALL
    assert found.forwards <= 8 + 1 + 2 * calls_of_a_row * -(-settings // probe.TOGETHER) + 3
    calls.clear()
    # `patch` itself runs the model at most twice, for constants of the recipe
    assert chosen(model, bits=3.5) == found and len(calls) <= 2, "what is known is not measured again"
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(3)
    calls.clear()
    assert chosen(model, bits=3.5).facts != found.facts and len(calls) > 10


def test_another_budget_measures_what_is_new_alone(nothing_known):
    model = noisy_llama()
    chosen(model, bits=4.5)
    calls = calls_of(model)
    known = chosen(model, bits=4.5).forwards
    assert chosen(model, bits=4.45).forwards == known and len(calls) <= 4  # of constants, which are the recipe's


@pytest.mark.slow
def test_a_key_channel_that_stands_out_is_not_spread_over_all():
    """Plain rotation does; what is chosen equalizes channels first, or has a scale for each."""
    model = stretched_llama()
    for bits in (3.5, 4.5):
        patch(model, bits=bits)
        spec = model._qattn.specs[0]
        assert spec.compute.rotate == "none" or spec.compute.equalize
        found = {one.setting: one.kl for one in model._qattn.recipe.chosen.tried}
        plain = "turboquant:k_format=turbo2,v_format=turbo2,norm_block=null"
        assert found[f"{plain},equalize_k=true"] < 0.9 * found[plain]
        assert model._qattn.recipe.chosen.facts["key_spread"] > 10
        unpatch(model)


def test_without_sinks_there_is_no_pool():
    """A pool gains nothing there, so of two settings that are as good the one without is taken."""
    found = patch(noisy_llama(), bits=4.5)._qattn
    assert found.specs[0].sink_pool.num == 0
    assert found.recipe.chosen.facts["sink_share"] < 0.1


def test_a_model_with_sinks_gets_a_pool(few):
    model = patch(AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=torch.float32).eval(), bits=2.5)
    found = model._qattn.recipe.chosen
    assert model._qattn.specs[-1].sink_pool.num and "built-in text" in found.read
    assert any(reason.startswith("Taken: a pool of attention sinks") for reason in found.reasons)


def test_the_report_says_what_was_chosen_and_why():
    model = patch(noisy_llama(), bits=3.5)
    before = report(model)
    model(random_ids(1, 300))
    data, shown = report(model).to_dict(), " ".join(str(report(model)).split())
    assert "chosen for 3.5 bits a value: " + data["chosen"]["setting"] in shown
    assert data["chosen"] == before.to_dict()["chosen"] and all(
        " ".join(r.split()) in shown for r in data["chosen"]["reasons"]
    )
    assert data["recipe_origin"].startswith("chosen for bits=3.5: ")
    assert report(patch(model, "turbo")).to_dict()["chosen"] is None


def test_what_was_chosen_is_kept_beside_the_weights(tmp_path):
    model = patch(noisy_llama(), bits=3.5)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    specs = patch(loaded)._qattn.specs
    assert specs == model._qattn.specs


def test_a_copy_and_unpatch():
    model, ids = noisy_llama(), random_ids(1, 50)
    exact = model(ids).logits
    patch(model, bits=3.5)
    assert copy.deepcopy(model)._qattn.recipe.chosen == model._qattn.recipe.chosen
    assert torch.equal(unpatch(model)(ids).logits, exact)


@pytest.mark.parametrize("earlier", [None, "int8"])
def test_a_probe_that_fails_leaves_the_model_as_it_was(probe_fails, earlier: str | None):
    model, ids = noisy_llama(), random_ids(1, 50)
    if earlier is not None:
        patch(model, earlier)
    exact, attention = model(ids).logits, model.config._attn_implementation
    probe_fails(model)
    assert torch.equal(model(ids).logits, exact) and model.config._attn_implementation == attention
    assert (model._qattn.recipe.method if earlier else hasattr(model, "_qattn")) == (earlier or False)


def test_a_probe_that_fails_leaves_earlier_caches(probe_fails):
    """The report has the last call's cache, and the cache goes on."""
    model, ids = patch(noisy_llama(), "int8"), random_ids(1, 120)
    cache = model(ids[:, :100], use_cache=True).past_key_values
    told = report(model).to_dict()
    goes_on = model(ids[:, 100:], past_key_values=copy.deepcopy(cache)).logits
    assert report(patch(model, "int8")).to_dict() != told, "a patch that succeeds forgets the cache"

    model = patch(noisy_llama(), "int8")
    cache = model(ids[:, :100], use_cache=True).past_key_values
    probe_fails(model)
    assert report(model).to_dict() == told
    assert torch.equal(model(ids[:, 100:], past_key_values=cache).logits, goes_on)


@pytest.mark.slow
def test_a_probe_that_fails_midway_keeps_what_was_known(monkeypatch, nothing_known):
    model = noisy_llama()
    chosen(model, bits=4.5)
    known, of = copy.deepcopy(probe.known_probe(model)), probe.token_losses

    def fail(*args: Any) -> Any:
        yield next(of(*args))
        raise QAttnError("planted")

    monkeypatch.setattr(probe, "token_losses", fail)
    with pytest.raises(QAttnError, match="planted"):
        patch(model, bits=8)
    again = probe.known_probe(model)
    assert (again.kl, again.seconds, again.forwards) == (known.kl, known.seconds, known.forwards)


def test_a_patched_model_chooses_as_an_unpatched_one(nothing_known):
    model = noisy_llama()
    found = chosen(model, bits=3.5)
    probe._known.clear()
    assert chosen(patch(model, "int8"), bits=3.5).tried == found.tried


def test_memory_bounds_what_was_chosen():
    model = patch(noisy_llama(), bits=3.5, memory="1MiB")
    recipe = model._qattn.recipe
    assert recipe.method == "turbo" and recipe.settings.memory == "1MiB"
    assert model._qattn.specs[0].v_bits == 2, "blocks end with the bits that were chosen"
    model(random_ids(1, 300))
    assert report(model).to_dict()["kv_bytes"] <= 2**20


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ({"bits": 1.5}, "take bits=2.5"),
        ({"bits": 2.1}, r"has 2.328 bits a value in closed blocks: take bits=2.33"),
        ({"bits": float("nan")}, "it is a number"),
        ({"kl": "mixed"}, "it is a number"),
        ({"bits": 3.5, "kl": 0.1}, "give one of them"),
        ({"kl": 0}, "above 0"),
        ({"kl": -1.0}, "above 0"),
        ({"kl": 1e-9}, "the best setting loses"),
        ({"bits": 3.5, "rotate_k": "hadamard"}, r'patch\(model, "turbo", bits, rotate_k\)|"turbo"'),
        ({"bits": 3.5, "memory": "12 apples"}, "memory"),
    ],
)
def test_budgets_that_cannot_be_met_are_refused(budget: dict[str, Any], said: str):
    model = noisy_llama()
    with pytest.raises(RecipeError, match=said):
        patch(model, **budget)
    assert not hasattr(model, "_qattn")


@pytest.mark.parametrize("settings", [{"bits": "mixed"}, {"bits": 2, "sink_num": 0}], ids=str)
def test_settings_that_only_turbo_takes_mean_turbo(settings: dict[str, Any]):
    recipe = patch(noisy_llama(), **settings)._qattn.recipe
    assert recipe.method == "turbo" and recipe.settings.bits == settings["bits"] and recipe.chosen is None


def test_a_model_that_cannot_be_observed_is_told_to_name_a_method():
    with pytest.raises(UnsupportedError, match=r"Name a method"):
        patch(tiny("deepseek_v3"), bits=3.5)


def test_whole_bits_are_said_to_choose():
    with pytest.warns(UserWarning, match=r'patch\(model, "turbo", bits=4\)') as told:
        patch(noisy_llama(), bits=4)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch(noisy_llama(), bits=4.0)
        patch(noisy_llama(), "turbo", bits=4)


def test_layers_of_windows_are_left_as_they_are(few):
    model = tiny("gemma3_text", initializer_range=0.3)
    found = chosen(model, bits=4.5)
    assert found.setting_bits <= 4.5


def test_the_list_of_candidates():
    """All of the package's that pack, equalized where keys are rotated, none twice."""
    model = noisy_llama(hidden_size=256, num_hidden_layers=3)  # head dim 64; SinkQ has no pool in two layers
    found = {one.setting: one for one in candidates(model, {})}
    assert {
        "low2",
        "low3",
        "turboquant:k_format=turbo4,equalize_k=true",
        "turbo",
        "sinkq",
        "int8",
        "turboquant",
        "turbo_sink_k4v2",
    } <= found.keys()
    assert "turbo_sink" not in found, "it is turbo"
    assert not {"none", "low2:equalize_k=true", "turbo:equalize_k=true", "kivi:equalize_k=true"} & found.keys()
    assert features(found["low2"]) == {"pool", "rotated", "equalized", "compensated"}
    assert {one.recipe.method for one in candidates(model, {"memory": "1GiB"})} == {"turbo"}


def test_sampled_tokens_are_what_the_model_expects():
    """Likelier than uniformly random ones, and the same each time."""
    model = tiny_llama(initializer_range=0.3)  # which expects some tokens more than others
    ids = text.sampled(model, 200)
    assert ids.shape == (1, 200) and torch.equal(ids, text.sampled(model, 200))

    def loss(tokens: torch.Tensor) -> float:
        with torch.no_grad():
            return float(model(tokens, labels=tokens).loss)

    assert loss(ids) < loss(random_ids(1, 200)) - 0.2  # nats a token
