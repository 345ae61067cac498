"""Steps of `qattn tune`: trials and estimates, losses of all layers, fp32, rows."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_llama
from test_tune import AT, CANDIDATES, LAYERS, PLAIN, noisy_llama

from qattn_hf import patch
from qattn_hf.cli.tune import tokens_for
from qattn_hf.fidelity.compare import compare
from qattn_hf.fidelity.estimate import fewer
from qattn_hf.fidelity.tune import Budget, tune
from qattn_hf.fidelity.tuner import Tuner
from qattn_hf.reading.chunks import cuts
from qattn_hf.reading.precision import in_float32
from qattn_hf.reading.sensitivity import Trial, losses
from qattn_hf.reading.texts import Reading, read_as
from qattn_hf.recipes.recipe import find_recipes


@pytest.fixture(scope="module")
def readings() -> tuple[Reading, Reading]:
    ids = random_ids(4, 300)
    return read_as(ids[:2], batch=8), read_as(ids[2:], steps=3, batch=8)


@pytest.mark.parametrize(
    ("candidate", "constant"),
    [("low2", "k.compensation"), ("turbo:rotate_k=hadamard,equalize_k=true", "k.equalizer")],
)
def test_a_candidate_with_constants_of_the_model_is_tried_with_them(readings, candidate: str, constant: str):
    """In a model of one layer a trial is what the patched model loses."""
    model = tiny_llama(num_hidden_layers=1, initializer_range=0.3)
    recipes = find_recipes([candidate])
    tuner = Tuner(model, recipes, readings[0], AT, torch.float32, lambda _: None)
    tuner.screen()
    trial = tuner._trial(0, candidate, "", 0)
    patched = patch(tiny_llama(num_hidden_layers=1, initializer_range=0.3), recipe=recipes[candidate])._qattn
    torch.testing.assert_close(trial.constants[constant], patched.constants[0][constant], atol=0, rtol=0)
    (alone,) = losses(model, [trial], readings[0])
    # compare leaves out each row's last token
    assert alone == pytest.approx(compare(model, recipes, readings[0])[0]["kl"], rel=2e-2)


@pytest.mark.slow
def test_few_trials_tell_the_others(readings):
    """With two trials per layer, estimates are within a factor of two of a separate trial."""
    model, candidates = noisy_llama(), find_recipes([*CANDIDATES, "turbo:bits=2", "low3", "turbo"])
    tuner = Tuner(model, candidates, readings[0], AT, torch.float32, lambda _: None)
    names = tuner.screen()
    tuner.options(names)
    assert sum(row["measured"] for row in tuner.trials) == 2 * LAYERS < len(tuner.trials) / 3
    keys = [(row["layer"], (row["candidate"], row["side"], row["head"])) for row in tuner.trials]
    each = losses(model, [tuner._trial(layer, *key) for layer, key in keys], tuner.reading)
    for row, true in zip(tuner.trials, each, strict=True):
        assert row["kl"] == pytest.approx(true, rel=1e-3 if row["measured"] else 1.0, abs=1e-7)
        assert true < 2 * row["kl"] + 1e-7


@pytest.fixture(scope="module")
def tuner(readings):
    """Screened and tried, on fp32 weights."""
    names = [*CANDIDATES, "turbo:bits=2", "low3"]
    found = Tuner(noisy_llama(), find_recipes(names), readings[0], AT, torch.float32, lambda _: None)
    found.options(found.screen())
    return found


@pytest.mark.slow
def test_losses_of_layers_add_up_to_the_loss_of_all(tuner):
    """Of every candidate, and of 2 bits in all heads of a side."""
    model, wholes = noisy_llama(), tuner.screened.wholes
    for name in ("int8", "turbo:bits=2", "low3"):
        trial = [tuner._trial(layer, name, "", 0) for layer in range(LAYERS)]
        assert next(losses(model, [trial], tuner.reading)) == pytest.approx(wholes[name], rel=1e-3)
        assert sum(tuner.every[i][name][0].kl for i in range(LAYERS)) == pytest.approx(wholes[name])
    raw = [sum(row["kl"] for row in tuner.trials if row["candidate"] == name) for name in ("turbo:bits=2", "low3")]
    assert raw != pytest.approx([wholes["turbo:bits=2"], wholes["low3"]], rel=0.01), "nothing to scale"
    for k_low, v_low, variant in (((), (), "no"), ((0, 1), (), "k"), ((), (0, 1), "v")):
        all_layers = [
            option.kl
            for i in range(LAYERS)
            for option in tuner.every[i][PLAIN]
            if (option.k_low, option.v_low) == (k_low, v_low)
        ]
        assert len(all_layers) == LAYERS
        assert sum(all_layers) == pytest.approx(wholes[f"{PLAIN}, 2 bits in {variant} heads"])


@pytest.mark.slow
def test_options_of_all_layers_are_tried_together(tuner):
    assert tuner.whole(tuner.in_all_layers("low3")) == pytest.approx(tuner.screened.wholes["low3"], rel=1e-3)


def test_the_best_candidate_for_all_layers_has_the_least_loss_that_fits(tuner):
    wholes = {name: tuner.screened.wholes[name] for name in ("int8", "turbo:bits=2", "low3", CANDIDATES[-1])}
    sizes = {name: 8 * sum(one.n_bytes for one in tuner.in_all_layers(name)) / tuner.values() for name in wholes}
    for bits in (max(sizes.values()), min(sizes.values()), sum(sizes.values()) / len(sizes)):
        best = min((name for name in wholes if sizes[name] <= bits), key=lambda name: wholes[name])
        assert tuner.uniform(bits) == (best, wholes[best])
    assert tuner.uniform(0.9 * min(sizes.values())) is None


def test_a_plan_that_loses_more_than_one_candidate_for_all_layers_is_not_taken(readings, monkeypatch):
    """Estimates that favor the worst options make such a plan."""
    module = import_module("qattn_hf.fidelity.tuner")

    def misled(errors: dict[Any, float], measured: dict[Any, float]) -> dict[Any, float]:
        return {key: 1 / error for key, error in errors.items()}

    monkeypatch.setattr(module, "estimated", misled)
    monkeypatch.setattr(Tuner, "_ratios", lambda *_: {"": 1.0, "k": 1.0, "v": 1.0})
    names = ["int8", "turbo:bits=2", "fp8"]
    found = tune(noisy_llama(), find_recipes(names), *readings, Budget(bits=16.0, at_tokens=AT))
    assert found.uniform is not None and found.predicted == found.uniform[1]
    assert {option.candidate for option in found.chosen} == {found.uniform[0]} != {"turbo:bits=2"}


def test_bf16_models_are_read_in_fp32(readings):
    """In bf16 rounding alone costs more than INT8 codes in one layer."""
    model, spec = noisy_llama().bfloat16(), find_recipes(["int8"])["int8"].layer_specs(noisy_llama().config)[1]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    (plain,) = losses(model, [Trial(1, spec)], readings[0])
    with in_float32(model):
        (exact,) = losses(model, [Trial(1, spec)], readings[0])
    wide = noisy_llama().bfloat16().float()
    assert exact == pytest.approx(next(losses(wide, [Trial(1, spec)], readings[0])), rel=1e-4)
    assert plain > 2 * exact
    after = model.state_dict()
    assert all(after[name].dtype == torch.bfloat16 and torch.equal(after[name], was) for name, was in before.items())


def test_weights_are_restored_after_an_error():
    model = noisy_llama().bfloat16()
    with pytest.raises(ValueError, match="planted"), in_float32(model):
        raise ValueError("planted")
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_long_readings_are_made_of_fewer_calls():
    for tokens in (1024, 4096):
        at = cuts(tokens, 61)
        few = fewer(at)
        assert few[0] == 0 and few[-1] == tokens and set(few) <= set(at) and 7 <= len(few) - 1 <= 12
    assert fewer(cuts(300, 61)) == cuts(300, 61)


def test_rows_are_no_longer_than_the_context():
    assert tokens_for(tiny_llama(max_position_embeddings=2048).config) == 2048
    assert tokens_for(tiny_llama(max_position_embeddings=2**17).config) == 4096
