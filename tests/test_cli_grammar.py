"""One grammar for all commands of `qattn`, and older command lines, which are read with a note."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from typer.models import ArgumentInfo, OptionInfo

from qattn_hf.cli import _older, app
from qattn_hf.cli._common import Precision, bytes_of
from qattn_hf.methods import get_method, list_methods

COMMANDS_AT_MOST = 14


def leaves(group: typer.Typer = app, before: str = "") -> Iterator[tuple[str, Any]]:
    """The function of each command of `qattn` by the command's name, such as `bench decode`."""
    for command in group.registered_commands:
        yield before + (command.name or command.callback.__name__), command.callback
    for inner in group.registered_groups:
        yield from leaves(inner.typer_instance, f"{inner.name} ")


LEAVES = dict(leaves())
FILE = (Path, Path | None)


def test_the_list_of_commands_is_short():
    assert len(typer.main.get_command(app).commands) <= COMMANDS_AT_MOST


@pytest.mark.parametrize("name", LEAVES)
def test_every_command_has_one_grammar(name):
    """MODEL is the one argument, `--json` a flag, `--output` a file, and sizes have one parser."""
    kinds = {key: kind for key, kind in get_type_hints(LEAVES[name]).items() if key != "return"}
    infos = {key: get_args(kind) for key, kind in get_type_hints(LEAVES[name], include_extras=True).items()}
    options = {}
    for key, args in infos.items():
        if args and isinstance(
            info := args[-1], OptionInfo
        ):  # typer keeps the first name of an annotation as a default
            names = [info.default] if isinstance(info.default, str) else [f"--{key.replace('_', '-')}"]
            options |= {decl: (kinds[key], info) for decl in (*names, *info.param_decls)}
    arguments = [key for key in kinds if isinstance(infos[key][-1], ArgumentInfo)]
    assert arguments in ([], ["model"], ["file"], ["name"]) and "--model" not in options
    assert "model" not in arguments or {*get_args(options["--dtype"][0])} == {*get_args(Precision)}
    assert "--json" in options or name in ("serve", "cache build")  # they print no results
    assert "--json" not in options or (options["--json"][0] is bool and "--output" in options)
    for what in {"--output", "--picture"} & options.keys():
        assert options[what][0] in FILE
    for what in {"--gpu-memory", "--weights", "--kv-memory", "--max-body"} & options.keys():
        assert options[what][1].parser is bytes_of
    assert options and [decl for decl, (_, info) in options.items() if not (info.help or "").endswith(".")] == []


@pytest.mark.parametrize(
    ("older", "today"),
    [
        ("warm MODEL --method turbo", "doctor MODEL --method turbo --compile"),
        ("report --tokens 9 --json", "cache report --tokens 9 --json"),
        ("report --model MODEL", "cache report MODEL"),
        ("compare --model MODEL --text book.txt", "compare MODEL --text book.txt"),
        ("compare --method turbo -m MODEL", "compare MODEL --method turbo"),
        ("compare --model=MODEL --methods turbo,kivi", "compare MODEL --method turbo,kivi"),
        ("compare --rollout 8 --model MODEL --draft SMALL", "rollout MODEL --new-tokens 8 --draft SMALL"),
        ("compare --rollout=8 --temperature 0.8", "rollout --new-tokens 8 --temperature 0.8"),
        ("generate 'Once upon' --chat --model MODEL", "generate MODEL --prompt 'Once upon' --chat"),
        ("generate --method turbo --chat 'Once upon'", "generate --method turbo --chat --prompt 'Once upon'"),
        ("demo --json figures.json", "demo --output figures.json"),
        ("inspect --model MODEL --output pictures", "inspect MODEL --pictures pictures"),
        ("inspect -o pictures --json numbers.json", "inspect --pictures pictures --output numbers.json"),
        ("tune --model MODEL --candidate turbo -o x.yaml", "tune MODEL --method turbo -o x.yaml"),
        ("check MODEL --gpu-memory 24 --weights 1.5", "doctor MODEL --gpu-memory 24GiB --weights 1.5GiB"),
        ("bench throughput --kv-mib 40960", "bench throughput --kv-memory 40960MiB"),
        ("bench generate --model MODEL --plot x.png", "bench generate MODEL --picture x.png"),
        ("serve MODEL --max-body-mib 8", "serve MODEL --max-body 8MiB"),
        ("--debug eval --task sums --model MODEL", "--debug eval MODEL --task sums"),
        ("eval --task sums --batch-size 64", "eval --task sums --batch 64"),
    ],
)
def test_an_older_command_line_is_read_and_the_new_one_is_named(capsys, older, today):
    assert _older.in_todays_grammar(shlex.split(older)) == shlex.split(today)
    assert capsys.readouterr().err.endswith(f"Type: qattn {today.removeprefix('--debug ')}\n")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "--version",
        "bench",
        "generate --help",
        "generate MODEL --prompt=hi",
        "generate -p hi MODEL",
        "inspect MODEL --pictures folder --json --output x.json",
        "compare MODEL --output=rows.json --json",
        "plan MODEL --gpu-memory=24GiB",
        "demo --json MODEL",
        "cache build MODEL --text book.txt -o prefix.safetensors",
        "bench decode --json --method turbo --batch 1",
    ],
)
def test_todays_grammar_is_left_alone(capsys, line):
    assert _older.in_todays_grammar(shlex.split(line)) == shlex.split(line)
    assert capsys.readouterr().err == ""


def test_an_older_command_line_runs(qattn):
    code, out, err = qattn("report", "--tokens", "80", "--method", "int8", "--json")
    assert code == 0 and json.loads(out)["method"] == "int8"
    assert "Type: qattn cache report --tokens 80 --method int8 --json" in err


@pytest.mark.parametrize("given", ["24", "24.5", "1e9", "12 parsecs", "-1GiB"])
def test_a_size_needs_its_unit(qattn, given):
    code, _, err = qattn("bench", "throughput", "--kv-memory", given)
    assert code == 2 and "GiB" in err and err.count("\n") == 1


def test_generate_gives_text_and_report_as_data(qattn, tmp_path):
    asked = ["generate", "--prompt", "Once upon a time", "--method", "int8", "--max-new-tokens", "4", "--device", "cpu"]
    data = json.loads(qattn(*asked, "--json", "--output", str(tmp_path / "answer.json"))[1])
    assert data["prompt"] == "Once upon a time" and data["report"]["method"] == "int8"
    assert qattn(*asked)[1].strip().startswith(data["text"].strip()) and data["text"]
    assert json.loads((tmp_path / "answer.json").read_text())["report"] == data["report"]


def test_methods_are_data_too(qattn):
    data = json.loads(qattn("methods", "turbo_sink", "--json")[1])["methods"]
    assert [one["name"] for one in data] == ["turbo"] and data[0]["kernels"] is True
    assert data[0]["settings"]["bits"] == {
        "allowed": "4, 2, mixed",
        "default": 4,
        "reference_only": [],
        "description": get_method("turbo").model_fields["bits"].description,
    }
    assert data[0]["settings"]["block_kv"]["reference_only"] == [32]
    assert [one["name"] for one in json.loads(qattn("methods", "--json")[1])["methods"]] == list_methods()


def test_a_text_that_is_not_utf8_is_named(qattn, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe")
    code, _, err = qattn("cache", "report", "--text", str(tmp_path / "latin.txt"))
    assert code == 1 and "latin.txt: the file is not UTF-8 text. Fix:" in err
