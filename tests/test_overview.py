"""The tables of settings, joined from several records, and what the front page recommends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_eval_scripts import ROOT, gpu_parts, tables

from qattn_hf import list_methods
from qattn_hf.recipes.recipe_files import list_recipes

RESULTS = ROOT / "eval" / "results"
MADE = re.compile(r"<!-- table:\S+ -->.*?<!-- /table -->", re.DOTALL)


def test_the_overview_joins_what_was_recorded_of_a_setting(tmp_path):
    (tmp_path / "results").mkdir()

    def record_rows(name: str, *rows: dict) -> None:
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps({"name": name, "rows": rows}))

    held = {"head_dim": 128, "kv_heads": 8, "tokens": 32768}
    turbo, int8 = {"method": "turbo", "bits": 2}, {"method": "int8"}
    record_rows(
        "bits",
        {**int8, **held, "effective_bits": 8.25, "effective_bits_total": 8.26},
        {**turbo, **held, "effective_bits": 2.26, "effective_bits_total": 2.29},
    )
    loss = {"same_top1": 0.9, "bits": 8.5}
    record_rows("released-smollm2", {"setting": "int8", "kl": 0.0022, **loss}, {"setting": "fp8", "error": "no"})
    record_rows("released-gemma3", {"setting": "turbo:bits=2", "kl": 0.1, **loss, "bits": 3.4})
    point = {"batch": 16, "context": 32768, "room": 1}
    ways = {"sdpa flash": 3.0, "sdpa cudnn packed": 2.0, "int8": 1.0, "turbo:bits=2": 0.8}
    timed = [{**point, "way": way, "ms": ms, "packed": way in ("int8", "turbo:bits=2")} for way, ms in ways.items()]
    record_rows("speed-decode", *timed, {**timed[2], "room": 4, "ms": 9.0})
    lines = tables.TABLES["settings"](tmp_path / "results").splitlines()[2:]
    assert lines == [
        "| `turbo:bits=2` | 2.26 | 2.29 |  |  |  |  | 2.50x |  |  |  |",  # measured in 3.4 bits: another format's KL
        "| `int8` | 8.25 | 8.26 | 0.0022 | 0.900 |  |  | 2.00x |  |  |  |",
    ]
    assert tables.TABLES["overview"](tmp_path / "results").splitlines()[2:] == lines[1:]
    record_rows("front-decode", {**timed[1], "ms": 4.0}, {**timed[2], "ms": 1.0})
    assert "4.00x" in tables.TABLES["overview"](tmp_path / "results"), "the record of the front page counts first"


def test_the_fastest_decode_is_worked_out_of_records(tmp_path):
    (tmp_path / "results").mkdir()
    sizes = {"head_dim": 128, "kv_heads": 8, "tokens": 32768, "effective_bits": 4.3, "effective_bits_total": 4.4}
    names = ("turbo", "nf4")
    bits = [{"method": name, **sizes} for name in names]
    timed = []
    for context, times in ((512, (1.0, 2.0)), (4096, (1.0, 0.9)), (8192, (1.0, 1.1))):
        point = {"batch": 1, "context": context, "room": 1}
        timed.append({**point, "way": "sdpa cudnn", "ms": 3.0, "packed": False})
        timed += [{**point, "way": name, "ms": ms, "packed": True} for name, ms in zip(names, times, strict=True)]
    for name, rows in (("bits", bits), ("speed-decode", timed)):
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps({"name": name, "rows": rows}))
    assert tables.TABLES["fastest"](tmp_path / "results").splitlines()[2:] == [
        "| 4 bits | `turbo` | 2 of 3 | 1 x 512, 1 x 8192 |",
        "| 4 bits | `nf4` | 1 of 3 | 1 x 4096 |",
    ]


def test_the_least_loss_of_a_width_is_worked_out_of_records(tmp_path):
    """By the larger of two checkpoints' KL; what one did not measure, or in other bits, does not count."""
    (tmp_path / "results").mkdir()
    sizes = {"head_dim": 128, "kv_heads": 8, "tokens": 32768, "effective_bits_total": 8.4}
    bits = {"int8": 8.25, "sage2": 8.26, "fp8": 8.25, "turbo": 4.26}
    losses = {
        "released-smollm2": {"int8": 0.001, "sage2": 0.002, "turbo": 0.01, "fp8": 0.0001},
        "released-gemma3": {"int8": 0.005, "sage2": 0.003, "turbo": 0.02},
    }
    rows = [{"method": name, "effective_bits": found, **sizes} for name, found in bits.items()]
    records = {"bits": rows} | {
        record: [{"setting": name, "kl": kl, "same_top1": 0.9, "bits": bits[name]} for name, kl in found.items()]
        for record, found in losses.items()
    }
    for name, found in records.items():
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps({"name": name, "rows": found}))
    assert tables.TABLES["least"](tmp_path / "results").splitlines()[2:] == [
        "| 9 | `sage2` | 8.26 | 0.0020 | 0.900 | 0.0030 | 0.900 |",
        "| 7 | `turbo` | 4.26 | 0.0100 | 0.900 | 0.0200 | 0.900 |",
        "| 5 | `turbo` | 4.26 | 0.0100 | 0.900 | 0.0200 | 0.900 |",
    ]


def test_the_front_page_names_the_safe_8_bits_by_record():
    """What README calls the smallest loss at 8 bits is what the records say, over both checkpoints."""
    first = tables.TABLES["least"](RESULTS).splitlines()[2]
    (line,) = [line for line in (ROOT / "README.md").read_text().splitlines() if "the smallest loss at 8 bits" in line]
    assert first.split(" | ")[1].strip("`") == line.split("`")[1]


@pytest.mark.parametrize("columns", ["bits", "prefill", "KL", "top-1", "decode"])
def test_no_recommended_setting_has_an_empty_cell(columns: str):
    header, _, *lines = (line.strip("| ").split(" |") for line in tables.TABLES["overview"](RESULTS).splitlines())
    cells = {line[0].strip(" `"): [x.strip() for x in line] for line in lines}
    chosen = [i for i, title in enumerate(header) if title.strip().startswith(columns)]
    assert list(cells) == list(gpu_parts.FRONT) and len(chosen) == 2
    assert [(name, header[i]) for name, line in cells.items() for i in chosen if len(line) <= i or not line[i]] == []


def test_the_record_of_the_front_page_measures_each_recommended_setting_at_each_point():
    for name, points in (("decode", gpu_parts.DECODES), ("prefill", gpu_parts.PREFILLS)):
        record, command = gpu_parts.front(name, [])
        methods = [command[i + 1] for i, word in enumerate(command) if word == "--method"]
        assert record == f"front-{name}" and methods == list(gpu_parts.FRONT)
        given = {f"--{key}={value}" for point in points.values() for key, value in point.items() if key != "room"}
        assert given <= {*command}


@pytest.mark.parametrize(("recorded", "shown"), [(8.54, True), (7.96, True), (8.56, False), (7.94, False)])
def test_quality_in_other_bits_than_the_rows_is_left_out(tmp_path, recorded: float, shown: bool):
    """Three tenths of a bit more or fewer are another format, and not scales of other head dims."""
    row = {"method": "int8", "head_dim": 128, "tokens": 32768, "effective_bits": 8.25, "effective_bits_total": 8.26}
    loss = {"setting": "int8", "kl": 0.5, "same_top1": 0.9, "bits": recorded}
    for name, held in (("bits", row), ("released-smollm2", loss)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name, "rows": [held]}))
    assert ("0.5000" in tables.TABLES["overview"](tmp_path)) == shown


def test_no_prose_calls_a_setting_the_fastest():
    """What is fastest, and where, a table says that is made of records."""
    names = "|".join(re.escape(name) for name in (*list_methods(), *list_recipes()))
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "qattn_hf").rglob("*.yaml")]
    assert claims("With `turbo`, the fastest 4-bit decode.", names) and not claims(
        "PyTorch's fastest attention.", names
    )
    found = [(page.name, claim) for page in pages for claim in claims(page.read_text(encoding="utf-8"), names)]
    assert found + methods_that_claim() == []


def claims(text: str, names: str) -> list[str]:
    """Sentences outside of generated tables that name a setting and the fastest."""
    sentences = re.split(r"(?<=[.:])\s+|\n\n", MADE.sub("", text))
    return [x for x in sentences if re.search(r"\bfastest\b", x) and re.search(rf"`({names})\b[^`]*`", x)]


def methods_that_claim() -> list[tuple[str, str]]:
    """Lines of the methods' own files, which their pages and commands show, that say `fastest`."""
    files = sorted((ROOT / "qattn_hf" / "methods").glob("*.py"))
    return [(path.name, line) for path in files for line in lines_of(path) if re.search(r"\bfastest\b", line)]


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()
