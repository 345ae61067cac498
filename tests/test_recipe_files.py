"""Recipes outside the package: in a checkpoint's folder, in another folder, and in a repository of the hub."""

from __future__ import annotations

import logging

import huggingface_hub
import pytest
from helpers import tiny_llama
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import AutoModelForCausalLM

from qattn_hf import QAttnCache, QAttnError, RecipeError, UnsupportedError, load_recipe, patch, report, unpatch
from qattn_hf.cli import main
from qattn_hf.recipes.recipe import find_recipe

TEXT = "method: turbo\nbits: 2\nlayers:\n  '1': {bits: 4}\n"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with one repository, `org/repo`; an error that is put into the list is raised in its place."""
    errors: list[Exception] = []
    (tmp_path / "qattn.yaml").write_text(TEXT)

    def download(repo_id: str, filename: str) -> str:
        if errors:
            raise errors[0]
        assert (repo_id, filename) == ("org/repo", "qattn.yaml")
        return str(tmp_path / filename)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return errors


def test_a_recipe_of_the_hub(hub):
    wanted = find_recipe("turbo:bits=2", None, {"family": False, "layers": {"1": {"bits": 4}}})
    for recipe in (
        load_recipe("org/repo"),
        patch(tiny_llama(), recipe="org/repo")._qattn.recipe,
        patch(tiny_llama(), "org/repo")._qattn.recipe,
    ):
        assert recipe.settings == wanted.settings and recipe.choices == wanted.choices
    assert load_recipe("org/repo:v_bits=4").settings.v_bits == 4


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LocalEntryNotFoundError("no connection"), "the hub cannot be reached, .* give a file or a folder"),
        (EntryNotFoundError("404, no such file"), "the hub gives no qattn.yaml: 404, no such file"),
        (OSError("401, gated"), "the hub gives no qattn.yaml: 401, gated"),
    ],
)
def test_a_hub_that_gives_none(hub, error, said):
    hub.append(error)
    with pytest.raises(RecipeError, match=f"recipe org/repo: {said}"):
        patch(tiny_llama(), recipe="org/repo")


def test_a_folder(tmp_path):
    with pytest.raises(RecipeError, match=r"no recipe at .*qattn\.yaml"):
        load_recipe(tmp_path)
    (tmp_path / "qattn.yaml").write_text(TEXT)
    assert (
        load_recipe(tmp_path).settings == load_recipe(str(tmp_path)).settings == load_recipe("turbo", bits=2).settings
    )
    assert load_recipe(f"{tmp_path}:bits=4").settings.bits == 4


def test_a_saved_model_keeps_its_recipe(tmp_path, caplog):
    model = patch(tiny_llama(), "turbo:bits=2", sink_num=3, layers={"1": {"method": "int8"}})
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with caplog.at_level(logging.WARNING):
        recipe = patch(loaded)._qattn.recipe
    assert recipe.given() == model._qattn.recipe.given()
    assert str(tmp_path / "qattn.yaml") in caplog.text
    assert report(loaded).to_dict()["recipe_origin"] == str(tmp_path / "qattn.yaml")
    assert patch(loaded, "turbo", bits=4)._qattn.recipe.settings.bits == 4
    unpatch(loaded)
    assert "save_pretrained" not in vars(loaded)
    assert QAttnCache.for_model(loaded).recipe.settings.bits == 2
    assert patch(loaded, "kivi")._qattn.recipe.method == "kivi", "a method that is named wins"


def test_the_command_line_takes_the_recipe_beside_the_weights(tmp_path, capsys):
    model = patch(tiny_llama(), "turbo:bits=2")
    model.save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        main(["doctor", str(tmp_path)])
    assert str(tmp_path / "qattn.yaml") in capsys.readouterr().out


def test_a_broken_recipe_beside_the_weights_is_named(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    assert patch(AutoModelForCausalLM.from_pretrained(tmp_path).eval())._qattn.recipe.method == "turbo"
    (tmp_path / "qattn.yaml").write_text("method: turbo\nbitz: 2\n")
    with pytest.raises(RecipeError, match=r"qattn\.yaml: unknown key 'bitz'"):
        patch(AutoModelForCausalLM.from_pretrained(tmp_path).eval())


def test_a_save_that_would_leave_the_recipe_behind_is_refused(tmp_path):
    model = patch(tiny_llama(), "turbo")
    with pytest.raises(UnsupportedError, match="push_to_hub"):
        model.save_pretrained(tmp_path / "new", push_to_hub=True)
    with pytest.raises(QAttnError, match="keep it in a variable, as in model = patch"):
        patch(tiny_llama(), "turbo").save_pretrained(tmp_path / "new")  # nobody holds this model any more
    assert not (tmp_path / "new").exists()
