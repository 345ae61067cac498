"""Draft acceptance: counted by hand, and against transformers' own assisted generation."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import random_ids, tiny_llama

from qattn_hf import QAttnError
from qattn_hf.assets import demo_model_dir
from qattn_hf.cli import main
from qattn_hf.fidelity.acceptance import acceptance, compare_drafts, first_layers, guessed
from qattn_hf.fidelity.rollout import GREEDY, roll_out
from qattn_hf.recipes.recipe import find_recipes


def test_by_hand():
    hits = torch.tensor([[True, True, False, True, True, True, True, False]])
    # of three drafted each: two right and a third wrong; then three right; then none of what is left
    assert acceptance(hits, 3) == (5 / 7, 8 / 3)
    assert acceptance(torch.ones(2, 6, dtype=torch.bool), 2) == (1.0, 3.0)
    assert acceptance(torch.zeros(1, 4, dtype=torch.bool), 2) == (0.0, 1.0)


def test_calls_are_those_of_assisted_generation():
    """A draft with the model's weights, but for some noise, is right here and there."""
    model, draft, prompt, drafted = tiny_llama(), tiny_llama(), random_ids(1, 40), 4
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    text = roll_out(model, prompt, 30, GREEDY).ids
    share, per_call = acceptance(guessed(draft, prompt, text) == text, drafted)
    assert 0.05 < share < 0.95
    calls = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, out: calls.append(out.shape[1]))
    draft.generation_config.num_assistant_tokens = drafted
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    got = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False, assistant_model=draft
    )
    assert torch.equal(got[:, 40:], text)
    # transformers drafts no more than fit the answer, so that its last calls may differ by one
    assert abs(len(calls) - 30 / per_call) <= 1


@pytest.mark.slow
def test_caches_lower_it_by_what_they_lose():
    model, recipes = tiny_llama(), find_recipes(["none", "turbo:bits=2"])
    full, none, turbo = compare_drafts(model, tiny_llama(), recipes, random_ids(2, 130), 24, batch=1)
    assert [row["method"] for row in (full, none, turbo)] == ["full precision", "none", "turbo:bits=2"]
    assert full["accepted"]["model"] == 1 and none["accepted"] == {"model": 1, "draft": 1, "both": 1}
    assert turbo["accepted"]["draft"] < 1 and turbo["accepted"]["both"] == 1  # of the same weights and codes
    assert not hasattr(model, "_qattn")


def test_other_vocabularies_are_refused():
    with pytest.raises(QAttnError, match="vocabulary of 97 tokens and the draft one of 50"):
        compare_drafts(tiny_llama(), tiny_llama(vocab_size=50), find_recipes(["int8"]), random_ids(1, 20), 8)


def test_a_draft_of_the_first_layers_shares_the_models_weights():
    model, ids = tiny_llama(), random_ids(1, 20)
    draft = first_layers(model, 1)
    assert {p.data_ptr() for p in draft.parameters()} < {p.data_ptr() for p in model.parameters()}
    with torch.no_grad():
        after_one = model(ids, output_hidden_states=True).hidden_states[1]
        assert torch.equal(draft(ids).logits, model.lm_head(model.model.norm(after_one)))
    for layers in (0, 2):
        with pytest.raises(QAttnError, match="the model has 2, and a draft needs fewer"):
            first_layers(model, layers)


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    text, draft = tmp_path / "text", str(demo_model_dir())
    text.write_text("The ship came home. " * 60)
    asked = ["--new-tokens", "8", "--rows", "1", "--tokens", "80", "--text", str(text), "--method", "int8", "--json"]
    asked += ["--dtype", "float32"]  # many CPUs have no products of bf16
    with pytest.raises(SystemExit) as ended:
        main(["rollout", "--draft", draft, *asked])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ended.value.code == 0 and [row["method"] for row in rows] == ["full precision", "int8"]
    assert rows[0]["accepted"]["model"] == 1  # the same model drafts
    with pytest.raises(SystemExit) as ended:
        main(["rollout", draft, "--draft-layers", "7", *asked])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ended.value.code == 0 and 0 <= rows[0]["accepted"]["model"] < 1
    for wrong, fix in (
        (["--temperature", "0.5"], "leave --temperature out"),
        (["--draft-layers", "1"], "leave one out"),
    ):
        with pytest.raises(SystemExit):
            main(["rollout", "--draft", draft, *wrong])
        assert fix in capsys.readouterr().err
