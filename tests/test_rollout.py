"""Rollouts: a cache's own text, judged by full precision."""

from __future__ import annotations

import json
import math

import pytest
import torch
from helpers import random_ids, tiny_llama

from qattn_hf import QAttnError, patch
from qattn_hf.cli import main
from qattn_hf.fidelity.rollout import GREEDY, Choice, compare_rollouts, judged, roll_out, rollout_figures
from qattn_hf.recipes.recipe import find_recipes


@pytest.fixture(scope="module")
def model():
    return tiny_llama(head_dim=16)


def test_a_greedy_continuation_is_that_of_generate(model):
    prompt = random_ids(2, 70)
    written = roll_out(model, prompt, 12, GREEDY)
    wanted = model.generate(prompt, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(prompt))
    assert torch.equal(written.ids, wanted[:, 70:])
    assert torch.equal(written.logits.argmax(-1), written.ids)


def test_full_precision_finds_nothing_in_its_own_text(model):
    prompt = random_ids(2, 70)
    found = judged(model, prompt, roll_out(model, prompt, 8, GREEDY))
    assert all(x.shape == (2, 8) for x in found.values())
    assert found["kl"].abs().max() < 1e-6  # calls of 61 tokens and single steps round differently
    assert found["same_top1"].min() == 1


def test_samples_are_of_the_distribution_and_of_the_seed():
    """20,000 tokens of three: 5 standard errors of a share are 0.018 at most."""
    logits = torch.tensor([0.0, 1.0, -1.0]).expand(200, 3)
    drawn = torch.stack([Choice(2.0, seed=3)(logits, 0, step) for step in range(100)])
    shares = torch.stack([(drawn == i).float().mean() for i in range(3)])
    torch.testing.assert_close(shares, (logits[0] / 2).softmax(-1), atol=0.018, rtol=0)
    assert torch.equal(drawn[7], Choice(2.0, seed=3)(logits, 0, 7))
    assert torch.equal(drawn[7, 5:], Choice(2.0, seed=3)(logits[5:], 5, 7))  # not of the batch
    assert not torch.equal(drawn[7], Choice(2.0, seed=4)(logits, 0, 7))


def test_figures_are_the_plain_formulas():
    kl = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 2.0, 4.0]])
    same = torch.tensor([[True, True, True, True], [True, False, True, False]])
    plain = {"kl": kl, "same_top1": kl * 0 + 1, "change": kl * 0, "nll_full": kl, "nll": kl}
    found = rollout_figures([{**plain, "same_as_own": same}])
    assert found["kl"] == 2.0 and found["kl_parts"] == [0.5, 1.0, 2.5, 4.0] and found["same_top1"] == 1
    assert found["first_divergence"] == 2.5 and found["same"] == 0.5
    assert found["ppl"] == pytest.approx(math.exp(2.0))


@pytest.mark.parametrize("choice", [GREEDY, Choice(1.0)], ids=["greedy", "sampled"])
def test_caches_are_ranked_by_what_they_keep(model, choice: Choice):
    """`none` writes full precision's text; two bits of a random model lose far more than eight."""
    recipes = find_recipes(["none", "int8", "turbo:bits=2,sink_num=0"])
    prompts = random_ids(3, 130)
    rows = compare_rollouts(model, recipes, prompts, 16, choice, batch=2)
    none, int8, turbo = rows
    assert [row["method"] for row in rows] == ["none", "int8", "turbo:bits=2,sink_num=0"]
    assert none["kl"] == pytest.approx(0, abs=1e-6) and none["same"] == 1 and none["first_divergence"] == 16
    assert 10 * abs(int8["kl"]) < turbo["kl"]  # eight bits lose less than fp32's rounding here, which has either sign
    assert none["ppl"] == pytest.approx(none["own_ppl"], rel=1e-4)
    assert turbo["effective_bits_total"] < int8["effective_bits_total"] < none["effective_bits_total"]
    assert not hasattr(model, "_qattn")
    alone = compare_rollouts(model, find_recipes(["int8"]), prompts, 16, choice, batch=3)[0]
    assert alone["first_divergence"] == int8["first_divergence"]


@pytest.mark.parametrize(
    ("prompt", "tokens", "said"),
    [(40, 8, "turbo packed nothing of 48"), (40, 3, "at least 4"), (1500, 600, "context of 2048: take fewer")],
)
def test_what_cannot_be_judged_is_said(model, prompt: int, tokens: int, said: str):
    with pytest.raises(QAttnError, match=said):
        compare_rollouts(model, find_recipes(["turbo"]), random_ids(1, prompt), tokens)
    assert not hasattr(model, "_qattn")


def test_a_patched_model_is_refused():
    model = tiny_llama(head_dim=16)
    patch(model, method="int8")
    with pytest.raises(QAttnError, match="unpatch"):
        compare_rollouts(model, find_recipes(["turbo"]), random_ids(1, 70), 8)


@pytest.mark.slow
def test_the_command(capsys):
    small = ["rollout", "--device", "cpu", "--rows", "1", "--tokens", "120", "--new-tokens", "8", "--method", "turbo"]
    small += ["--dtype", "float32"]  # many CPUs have no products of bf16
    with pytest.raises(SystemExit) as ended:
        main([*small, "--json", "--temperature", "0.5"])
    row = json.loads(capsys.readouterr().out)
    assert not ended.value.code and row["method"] == "turbo" and len(row["kl_parts"]) == 4
    assert (row["prompt"], row["tokens"], row["temperature"], row["kl_se"]) == (120, 8, 0.5, None)
    with pytest.raises(SystemExit) as ended:
        main(small)
    assert not ended.value.code and "first divergence" in capsys.readouterr().out
