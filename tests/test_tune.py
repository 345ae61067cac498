"""`qattn tune`: budgets are met as counted from real tensors, plans are the best, recipes say what was chosen."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
import torch
from helpers import random_ids, tiny_llama
from small_types import tiny
from transformers import AutoModelForCausalLM

from qattn_hf import QAttnError, load_recipe, patch, report
from qattn_hf.cache.sizes import bits_total, size_of
from qattn_hf.cli import main
from qattn_hf.fidelity.budget import plans, within_bytes, within_kl
from qattn_hf.fidelity.compare import compare, through
from qattn_hf.fidelity.options import HeadLosses, Option, by_head
from qattn_hf.fidelity.tune import Budget, tune
from qattn_hf.fidelity.tuned import ranges, recipe_of
from qattn_hf.reading.chunks import cuts, feed
from qattn_hf.reading.metrics import text_figures
from qattn_hf.reading.sensitivity import Trial, losses
from qattn_hf.reading.texts import full_logits, read_as
from qattn_hf.recipes.recipe import find_recipe, find_recipes

PLAIN = "turbo:bits=mixed,sink_num=0"
CANDIDATES = [PLAIN, "turbo:bits=mixed,sink_num=1", "int8", "turboquant:k_format=turbo2,v_format=turbo2"]
LAYERS, AT = 3, 512


def noisy_llama() -> Any:
    """Weights large enough that what a layer's codes lose shows in the logits, and unlike from layer to layer."""
    return tiny_llama(num_hidden_layers=LAYERS, initializer_range=0.15)


@pytest.fixture(scope="module")
def readings():
    ids = random_ids(4, 300)
    return read_as(ids[:2], batch=8), read_as(ids[2:], steps=3, batch=8)


@pytest.fixture(scope="module")
def by_bits(readings):
    references = find_recipes([PLAIN])
    budget = Budget(bits=5.85, at_tokens=AT)  # what half the heads in 2 bits take, ring and head dim 16 counted
    return tune(noisy_llama(), find_recipes(CANDIDATES), *readings, budget, references=references)


def test_plans_are_the_best_of_all():
    """Against every combination of options of small random layers."""
    rng = random.Random(0)
    layers = [[(rng.randint(5, 30), rng.random()) for _ in range(5)] for _ in range(4)]
    found = plans(layers)
    every = [
        (sum(layer[i][0] for layer, i in zip(layers, picks, strict=True)),
         sum(layer[i][1] for layer, i in zip(layers, picks, strict=True)))
        for picks in itertools.product(range(5), repeat=4)
    ]  # fmt: skip
    for limit in range(min(e[0] for e in every), 120, 3):
        plan = within_bytes(found, limit)
        assert plan is not None and plan.n_bytes <= limit
        assert plan.kl == pytest.approx(min(kl for size, kl in every if size <= limit))
        assert plan.kl == pytest.approx(sum(layer[i][1] for layer, i in zip(layers, plan.picks, strict=True)))
    for most in (0.5, 1.0, 1.5):
        plan, sizes = within_kl(found, most), [size for size, kl in every if kl <= most]
        assert plan is None if not sizes else plan is not None and plan.n_bytes == min(sizes)
    assert within_bytes(found, min(e[0] for e in every) - 1) is None


def test_heads_that_mind_least_go_first():
    found = HeadLosses(1.0, k=[1.5, 1.1, 0.9], v=[1.0, 3.0, 1.0])
    heads, loss = zip(*found.ladder(found.k), strict=True)
    assert heads == ((), (2,), (1, 2), (0, 1, 2)) and loss == pytest.approx((0, 0, 0.1, 0.6))
    every = list(found.combinations())
    assert len(every) == 16 and every[0] == ((), (), 1.0) and every[-1][2] == pytest.approx(1.0 + 0.6 + 2.0)


def test_a_trial_packs_its_layer_and_no_other(readings):
    """A trial in a model of one layer is the patched model; several trials at once are what each is alone."""
    model, reading = tiny_llama(num_hidden_layers=1, initializer_range=0.3), readings[0]
    recipe = find_recipes(["turbo:bits=2"])["turbo:bits=2"]
    (alone,) = losses(model, [Trial(0, recipe.layer_specs(model.config)[0])], reading)
    figures = compare(model, {"turbo:bits=2": recipe}, reading)[0]
    assert alone == pytest.approx(figures["kl"], rel=1e-2)  # scored with the last token of a row, which compare leaves
    model = noisy_llama()
    specs = [*recipe.layer_specs(model.config), find_recipes(["none"])["none"].layer_specs(model.config)[1]]
    trials = [Trial(0, specs[0]), Trial(2, specs[2]), Trial(1, specs[3]), Trial(0, specs[0])]
    together = list(losses(model, trials, reading))
    each = [next(iter(losses(model, [trial], reading))) for trial in trials]
    assert together == pytest.approx(each, rel=1e-3, abs=1e-8)
    assert abs(together[2]) < 1e-6 < min(together[0], together[1])


def test_a_trial_counts_what_readers_of_its_keys_lose():
    """Of Gemma 3n's type the last layer reads the keys of layer 3: its trial is the model with that alone packed."""
    model, ids = tiny("gemma3n_text", initializer_range=0.3), random_ids(2, 150) % 90 + 3
    reading = read_as(ids, batch=2)
    low = find_recipes(["turbo:bits=2"])["turbo:bits=2"].layer_specs(model.config)[3]
    (found,) = losses(model, [Trial(3, low)], reading)
    layers = {"3-5": {"method": "turbo", "bits": 2}}
    recipe = find_recipe("none", None, {"sliding": "exact", "layers": layers})
    figures = compare(model, {"only layer 3": recipe}, reading)[0]
    # without the reader it is a fifth; compare leaves out each row's last token
    assert found == pytest.approx(figures["kl"], rel=0.1)


@pytest.mark.slow
def test_a_budget_in_bits_is_met_by_real_tensors(by_bits, readings):
    model = patch(noisy_llama(), recipe=by_bits.recipe)
    *_, last = feed(model, readings[0].ids, cuts(300, 61))
    bits = size_of(last.cache, AT, torch.float32).effective_bits_total
    assert bits == by_bits.checked[0]["effective_bits_total"] <= 5.85
    assert bits == pytest.approx(8 * sum(option.n_bytes for option in by_bits.chosen) / (AT * LAYERS * 2 * 2 * 16))
    specs = dict(enumerate(model._qattn.specs))
    assert bits_total(model.config, specs, AT, torch.float32) == pytest.approx(bits)


@pytest.mark.slow
def test_it_loses_no_more_than_the_uniform_recipe_of_its_bits(by_bits, readings):
    tuned, half = by_bits.checked
    assert half["effective_bits_total"] >= 5.84  # else the budget would not compare them
    assert tuned["kl"] < half["kl"]
    measured = text_figures(through_all(noisy_llama(), by_bits.recipe, readings[0]))["kl"]
    assert measured == pytest.approx(by_bits.predicted, rel=0.5)  # predicted on full-precision inputs


@pytest.mark.slow
def test_a_budget_in_kl_is_met_as_measured(readings):
    model, candidates = noisy_llama(), find_recipes(CANDIDATES)
    found = tune(model, candidates, *readings, Budget(kl=0.02, at_tokens=AT))
    assert found.measured["kl"] <= 0.02
    again = text_figures(through_all(model, found.recipe, readings[0]))["kl"]
    assert again == pytest.approx(found.measured["kl"], rel=1e-4)
    tighter = tune(model, candidates, *readings, Budget(kl=0.002, at_tokens=AT))
    assert tighter.measured["kl"] <= 0.002
    assert tighter.measured["effective_bits_total"] > found.measured["effective_bits_total"]


def through_all(model: Any, recipe: Any, reading: Any) -> dict[str, torch.Tensor]:
    return through(model, recipe, "again", reading.ids, reading, full_logits(model, reading.ids, reading))[0]


@pytest.mark.parametrize(
    ("budget", "candidates", "said"),
    [
        ({"bits": 2.0, "at_tokens": AT}, ["turbo:bits=mixed"], "the smallest choice of these candidates takes"),
        ({"kl": 1e-9, "at_tokens": AT}, ["turbo:bits=mixed"], "the best that was found of these candidates loses"),
        ({"bits": 24.0, "at_tokens": AT}, ["kivi"], "too few to judge it by"),
    ],
)
def test_budgets_that_cannot_be_met_are_refused(readings, budget: dict[str, Any], candidates: list[str], said: str):
    reading = read_as(readings[0].ids[:, :150], batch=2) if candidates == ["kivi"] else readings[0]
    model, steps = noisy_llama(), []
    with pytest.raises(QAttnError, match=said):
        tune(model, find_recipes(candidates), reading, readings[1], Budget(**budget), progress=steps.append)
    assert not hasattr(model, "_qattn")
    assert bool(steps) == (budget != {"bits": 2.0, "at_tokens": AT})  # bytes are known before any trial


@pytest.mark.parametrize("budget", [{}, {"bits": 3.0, "kl": 0.1}, {"bits": -1.0}, {"kl": 0.0}])
def test_a_budget_is_one_number_above_zero(budget: dict[str, float]):
    with pytest.raises(QAttnError, match="give one of them"):
        Budget(**budget)


def options_of(names: list[str]) -> list[Option]:
    """The first candidate for two layers, the second for the third."""
    return [Option(layer, names[i], (), (), 1, 0.0) for layer, i in enumerate((0, 0, 1))]


def test_the_recipe_gives_each_layer_its_option(tmp_path):
    """Lists of heads for the common candidate, entries for the others, and settings that they must not inherit."""
    names = [PLAIN, "turbo:bits=mixed,sink_num=3", "turbo:bits=2,smooth_k=true,sink_num=0", "kivi:bits=4"]
    candidates = find_recipes(names)
    chosen = [(1, (0,), (0, 1)), (1, (), ()), (0, (1,), ()), (2, (), ()), (3, (), ()), (1, (0, 1), (0,))]
    options = [Option(layer, names[i], k, v, 1, 0.0) for layer, (i, k, v) in enumerate(chosen)]
    recipe = recipe_of(options, candidates, len(chosen))
    path = tmp_path / "tuned.yaml"
    path.write_text(recipe.as_yaml(), encoding="utf-8")
    specs = load_recipe(path).layer_specs(tiny_llama(num_hidden_layers=6).config)
    assert [spec.sink_pool.num for spec in specs] == [3, 3, 0, 0, 0, 3]
    assert [spec.k.name for spec in specs] == ["flashq", "flashq", "flashq", "smoothed", "kivi", "flashq"]
    assert specs[3].k.core.bits == specs[3].v.bits == 2
    assert [specs[i].k.low_heads for i in (0, 1, 2, 5)] == [(0,), (), (1,), (0, 1)]
    assert [specs[i].v.low_heads for i in (0, 1, 2, 5)] == [(0, 1), (), (), (0,)]
    model = patch(tiny_llama(num_hidden_layers=6), recipe=path)
    *_, last = feed(model, random_ids(1, 260), [0, 200, 260])
    rows = report(last.cache).to_dict()["layers"]
    assert [row["bits_per_head"]["k"][0] for row in rows] == [[2, 4], [4, 4], [4, 2], [2, 2], [4, 4], [2, 2]]


def test_entries_say_again_what_their_bits_would_cover(tmp_path):
    names = ["turbo:bits=2,k_bits=4", "turbo:bits=mixed,n_h=1,k_bits=4"]
    recipe = recipe_of(options_of(names), find_recipes(names), 3)
    path = tmp_path / "tuned.yaml"
    path.write_text(recipe.as_yaml(), encoding="utf-8")
    specs = load_recipe(path).layer_specs(tiny_llama(num_hidden_layers=3).config)
    assert [(spec.k.bits, spec.v.bits) for spec in specs] == [(4, 2), (4, 2), (4, "mixed")]


@pytest.mark.parametrize("base", ["sage2:granularity=token", "sage2:bits=4,smooth_q=none", "sage2:bits=4"])
def test_entries_change_what_their_base_has(base: str):
    names = [base, "sage1"]
    recipe = recipe_of(options_of(names), find_recipes(names), 3)
    config = tiny_llama(num_hidden_layers=3).config
    alone = [found.layer_specs(config) for found in find_recipes(names).values()]
    assert recipe.layer_specs(config) == [alone[0][0], alone[0][1], alone[1][2]]


def test_a_candidate_is_for_any_layer(readings):
    mixed = find_recipe("turbo", None, {"layers": {"0": {"bits": 2}}})
    with pytest.raises(QAttnError, match="leave out layers"):
        tune(noisy_llama(), {"mixed": mixed}, *readings, Budget(bits=4.0))


def test_which_candidates_are_tried_head_by_head():
    texts = ["turbo:bits=mixed,sink_num=2", "turbo", "turbo:bits=mixed,n_h=1", "turbo:bits=mixed,k_bits=4", "kivi"]
    assert [by_head(recipe) for recipe in find_recipes(texts).values()] == [True, False, False, False, False]


def test_layers_are_named_in_runs():
    assert ranges([0, 1, 2, 5]) == "0-2,5" and ranges([3]) == "3" and ranges([4, 0, 1]) == "0-1,4"


def test_the_command_writes_a_recipe_that_patch_takes(tmp_path, capsys):
    from qattn_hf.assets import demo_model_dir

    target, details, drawn = (tmp_path / name for name in ("tuned.yaml", "tuned.json", "tuned.png"))
    small = ["--rows", "1", "--check-rows", "1", "--tokens", "140", "--steps", "2", "--device", "cpu"]
    small += ["--dtype", "float32"]  # many CPUs have no products of bf16
    candidates = ["--method", "turbo:bits=mixed", "--method", "turbo:sink_num=3"]
    files = ["-o", str(target), "--trials", str(details), "--picture", str(drawn)]
    with pytest.raises(SystemExit) as ended:
        main(["tune", "--bits", "3.25", *files, *candidates, *small])
    out = capsys.readouterr().out
    assert not ended.value.code and "KL predicted" in out and str(target) in out.replace("\n", "")
    text = target.read_text()
    assert text.startswith("# Tuned for embedded demo model") and "k_low_heads" in text
    tried = json.loads(details.read_text())["rows"]
    heads = [row for row in tried if row["candidate"] == "turbo:bits=mixed"]
    assert len(heads) == 8 * 5 and {row["layer"] for row in heads} == set(range(8))  # 2 heads, 2 sides, and none
    assert [(row["side"], row["head"]) for row in heads[:5]] == [("", 0), ("k", 0), ("k", 1), ("v", 0), ("v", 1)]
    assert drawn.read_bytes().startswith(b"\x89PNG")
    model = patch(AutoModelForCausalLM.from_pretrained(demo_model_dir()).eval(), recipe=target)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)


@pytest.fixture
def drawn(monkeypatch):
    """Figures that were saved."""
    figures = pytest.importorskip("matplotlib.figure", reason="matplotlib is not installed: pip install matplotlib")
    found: list[Any] = []
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, *args, **kwargs: found.append(self))
    return found


@pytest.mark.parametrize("heads", [0, 2])
def test_a_picture_of_trials_has_a_panel_for_heads_only_if_heads_were_tried(drawn, tmp_path, heads: int):
    from qattn_hf.fidelity.picture import draw_sensitivity

    tried = [("", 0), *((side, head) for side in "kv" for head in range(heads))]
    rows = [{"layer": i, "candidate": "turbo", "side": s, "head": h, "kl": 0.1 + i} for i in range(3) for s, h in tried]
    draw_sensitivity(rows, ["turbo"] * 3, tmp_path / "trials.png", "title")
    titles = [axes.get_title() for axes in drawn[0].axes if axes.get_title()]
    assert titles == ["KL of the layer alone", "KL that 2 bits in one head add"][: 1 + (heads > 0)]


@pytest.mark.parametrize("bits", [(5.0, 5.5), (2.5, 32.0)])
def test_the_axis_of_bits_has_numbers_however_near_they_are(drawn, tmp_path, bits: tuple[float, ...]):
    from qattn_hf.fidelity.picture import draw

    layers = {"average": {"relative_l1": 0.1}, "worst": {"relative_l1": 0.2}}
    shared = {"kl": 0.1, "pareto": True, "at_tokens": 64, "attention": layers}
    draw([{"method": str(b), "effective_bits_total": b, **shared} for b in bits], tmp_path / "rows.png", "title")
    axis = drawn[0].axes[0].xaxis
    low, high = axis.get_view_interval()
    assert sum(low <= place <= high for place in axis.get_majorticklocs()) >= 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "x.yaml"], "give one of them"),
        (["-o", "x.txt", "--bits", "3"], "a recipe is a .yaml file"),
        (["-o", "x.yaml", "--bits", "3", "--method", "turbbo"], "unknown method 'turbbo'"),
    ],
)
def test_what_cannot_be_tuned_is_one_line(capsys, arguments: list[str], said: str):
    with pytest.raises(SystemExit) as ended:
        main(["tune", "--device", "cpu", *arguments])
    error = capsys.readouterr().err
    assert ended.value.code in (1, 2) and said in error and len(error.strip().splitlines()) == 1
