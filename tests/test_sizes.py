"""Sizes have one spelling in recipes, Python and commands, and a missing unit is never read as bytes by mistake."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers import tiny_llama

from qattn_hf import RecipeError, load_recipe
from qattn_hf.cli import main
from qattn_hf.messages import parse_size
from qattn_hf.planning.plan import Memory, Planner
from qattn_hf.recipes.recipe import find_recipe

SIZES = {
    "300KiB": 300 * 2**10,
    "800MiB": 800 * 2**20,
    "24GiB": 24 * 2**30,
    "1.5TiB": 3 * 2**39,
    "300kb": 300_000,
    "126 MB": 126_000_000,
    " 80 GB ": 80 * 10**9,
    "0.1TB": 10**11,
    "126000": 126_000,
}


@pytest.fixture
def qattn(capsys, monkeypatch, tmp_path):
    """Run `qattn COMMAND` on a folder with the config of a small model, without the seconds that a plan takes."""
    monkeypatch.setattr(Planner, "longest", lambda *_: 1)
    monkeypatch.setattr(Planner, "largest", lambda *_: 1)
    monkeypatch.setattr(Planner, "memory", lambda *_: Memory(1, 1, 1, 1))
    tiny_llama(head_dim=64).config.save_pretrained(tmp_path)

    def run(command: str, *arguments: str) -> tuple[int, str, str]:
        model = [str(tmp_path), *(() if command == "doctor" else ("--method", "int8"))]
        with pytest.raises(SystemExit) as ended:
            main([command, *model, *arguments])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.mark.parametrize("text", SIZES)
def test_a_size_is_a_number_and_a_unit(text):
    assert parse_size(text) == SIZES[text]


@pytest.mark.parametrize(
    "text", ["", "GiB", "a lot", "12 parsecs", "-1GiB", "1e9", "1.5.2GiB", "nan", "9" * 5000, "1,5GiB"]
)
def test_what_is_no_size_is_named(text):
    with pytest.raises(ValueError, match=r"is no size such as 24GiB, 1\.5TB or 300KiB"):
        parse_size(text)


def settings_of(memory: Any, way: str, tmp_path: Any) -> Any:
    """Settings of turbo with this memory: of a recipe file, of Python, or as `--method` spells them."""
    if way == "yaml":
        (tmp_path / "mine.yaml").write_text(f"method: turbo\nmemory: {memory}\n", encoding="utf-8")
        return load_recipe(tmp_path / "mine.yaml").settings
    if way == "python":
        return find_recipe("turbo", None, {"memory": memory}).settings
    return find_recipe(f"turbo:memory={memory}", None, {}).settings


WAYS = ("yaml", "python", "method")


@pytest.mark.parametrize("way", WAYS)
def test_a_number_without_a_unit_is_refused_where_it_is_no_size_of_a_cache(way, tmp_path):
    with pytest.raises(RecipeError, match=r"24 bytes.*memory: 24GiB"):
        settings_of(24, way, tmp_path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("memory", "n_bytes"), [("300KiB", 307_200), ("1.5 TB", 1_500_000_000_000), (126_000, 126_000)]
)
def test_a_memory_is_read_alike_everywhere(memory, n_bytes, way, tmp_path):
    assert settings_of(memory, way, tmp_path).last_layer_spec(2).memory == n_bytes


@pytest.mark.parametrize("memory", ["24", "1 KiB", "0GiB"])
def test_a_text_of_too_few_bytes_is_refused_too(memory):
    with pytest.raises(RecipeError, match=r"memory=.* too few for a cache.*memory: 12GiB"):
        find_recipe("turbo", None, {"memory": memory})


@pytest.mark.parametrize("spelled", ["3GiB", "3072 MiB", "3gib"])
@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_commands_spell_sizes_alike(command, spelled, qattn):
    code, out, err = qattn(command, "--gpu-memory", spelled, "--weights", "512MiB", "--json")
    data = json.loads(out)
    assert (code, err) == (0, "") and data["weights" if command == "plan" else "weight_bytes"] == 2**29
    again = json.loads(qattn(command, "--gpu-memory", "3GiB", "--weights", "0.5GiB", "--json")[1])
    assert again == data and (command == "doctor" or data["gpu_memory"] == 3 * 2**30)


@pytest.mark.parametrize("option", ["--gpu-memory", "--weights"])
@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_commands_refuse_what_is_no_size(command, option, qattn):
    code, out, err = qattn(command, option, "12 parsecs")
    assert code == 2 and not out and err.count("\n") == 1 and option in err and "24GiB" in err
