"""One spelling of a method with settings: read the same in Python and by every command."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import typer
from helpers import tiny_llama

from qattn_hf import QAttnCache, QAttnError, RecipeError, load_recipe, patch, report
from qattn_hf.bench import first_call
from qattn_hf.cli import app
from qattn_hf.recipes.recipe import find_recipe, find_recipes, list_recipes
from qattn_hf.recipes.spelling import split_method, split_methods

MISSING = ("./missing",)  # found after the method was read
COMMANDS = {
    "demo": MISSING,
    "doctor": MISSING,
    "plan": ("--gpu-memory", "24GiB", *MISSING),
    "generate": (*MISSING, "--prompt", "hi"),
    "cache report": MISSING,
    "compare": MISSING,
    "rollout": MISSING,
    "eval": ("--task", "gsm8k_cot", *MISSING),
    "inspect": ("--pictures", "pictures", *MISSING),
    "retrieval": ("--output", "retrievals.json", *MISSING),
    "tune": ("--output", "tuned.yaml", "--bits", "4", *MISSING),
    "bench decode": ("--heads", "0"),
    "bench prefill": ("--heads", "0"),
    "bench tiles": ("--heads", "0"),
    "bench generate": ("--way", "turbo eagre"),
    "bench first-call": (),  # it would begin to measure
    "bench throughput": ("--kv-memory", "1KiB"),
    "bench requests": ("--kv-memory", "1KiB"),
    "serve": MISSING,
    "cache build": ("./missing", "--text", __file__, "--output", "prefix.safetensors"),
}
BEGINS = "it begins to measure"
AFTERWARDS = ("./missing", "--heads 0", "turbo eagre", "at least 1MiB", BEGINS)  # what is found last
SPELLINGS = (
    "turbo",
    "turbo:bits=2",
    "kivi:k_bits=4,v_bits=2",
    "turbo_sink",
    "turbo_sink_k4v2:sink_num=2,sink_window=4",
    "turbo:bits=mixed,k_low_heads=[[0],[1,0]],v_low_heads=[[0],[1,0]]",
)


def commands_with_a_method() -> dict[str, list[str]]:
    """Each command of `qattn` that takes a method, with the names of that option."""
    found = {}
    for name, command in typer.main.get_command(app).commands.items():
        for inner, leaf in getattr(command, "commands", {"": command}).items():
            options = [option for p in leaf.params for option in p.opts if option in ("--method", "--methods")]
            if options:
                found[f"{name} {inner}".strip()] = options
    return found


@pytest.fixture
def run(qattn, monkeypatch):
    """Run a command with what `COMMANDS` has for it: `(exit code, stdout, stderr)`."""
    monkeypatch.setattr(first_call, "rows", Mock(side_effect=QAttnError(BEGINS)))
    return lambda command, *arguments: qattn(*command.split(), *COMMANDS[command], *arguments)


def test_every_command_that_takes_a_method_is_asked_below():
    assert set(commands_with_a_method()) == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_reads_every_spelling(run, tmp_path, command):
    path = tmp_path / "mine.yaml"
    path.write_text("method: int8\nsmooth_k: true\n")
    for option in commands_with_a_method()[command]:
        for text in (*SPELLINGS, str(path), f"{path}:smooth_k=false"):
            code, _, err = run(command, option, text)
            assert code and any(what in err for what in AFTERWARDS), (option, text, err)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("turbo_snk", ("unknown method 'turbo_snk', did you mean 'turbo_sink'?", "kivi", "turbo_sink_k4v2", ".yaml")),
        ("turbo:bitz=2", ("unknown key 'bitz', did you mean 'bits'?", "smooth_k")),
        ("turbo:bits=5", ("bits = 5", "4, 2 or 'mixed'")),
        ("turbo:bits", ("KEY=VALUE", "'bits'")),
        ("missing.yaml", ("no recipe at missing.yaml", "turbo_sink")),
    ],
)
def test_every_command_says_the_same_of_what_cannot_be(run, command, text, said):
    code, _, err = run(command, "--method", text)
    assert code and all(part in err for part in said), err


def test_python_reads_what_the_commands_read():
    model = tiny_llama()
    for text in SPELLINGS:
        name, settings = split_method(text)
        asked = {"method": name} if name not in list_recipes() or name in ("turbo", "kivi") else {"recipe": name}
        apart = patch(model, **asked, **settings)._qattn.recipe
        together = patch(model, text)._qattn.recipe
        assert together.settings == apart.settings and together.by_family == apart.by_family
        assert QAttnCache.for_model(model, text).recipe.settings == apart.settings
        assert find_recipes([text])[text].settings == apart.settings
    assert load_recipe("turbo_sink:sink_num=2").settings == load_recipe("turbo_sink", sink_num=2).settings
    assert report(patch(model, "turbo:bits=2")).to_dict()["recipe_origin"].startswith("defaults of turbo with bits=2")


def test_a_setting_has_one_place():
    with pytest.raises(RecipeError, match="bits is given twice, in the method's text and separately"):
        patch(tiny_llama(), "turbo:bits=2", bits=4)
    with pytest.raises(RecipeError, match="bits is given twice"):
        find_recipe("turbo:bits=2,bits=4", None, {})
    assert find_recipe("turbo:k_bits=4", "turbo_sink", {"v_bits": 2}).settings.v_bits == 2
    with pytest.raises(RecipeError, match=r"clashes with .*turbo_sink\.yaml"):
        find_recipe("kivi:bits=2", "turbo_sink", {})


def test_a_text_is_split_where_a_new_method_begins():
    assert split_methods(["turbo:k_bits=4,v_bits=2,kivi", "none"]) == ["turbo:k_bits=4,v_bits=2", "kivi", "none"]
    layers = 'turbo:layers={"0": {"bits": 2, "smooth_k": true}},k_bits=4'
    assert split_methods([f"{layers},int8"]) == [layers, "int8"]
    assert split_method(layers)[1] == {"layers": {"0": {"bits": 2, "smooth_k": True}}, "k_bits": 4}
    assert split_method(r"C:\mine.yaml:bits=2") == (r"C:\mine.yaml", {"bits": 2})
    assert split_method("turboquant:k_format=q4,norm_block=null")[1] == {"k_format": "q4", "norm_block": None}
