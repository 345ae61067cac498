"""Declared tables, and the records that they read."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from speed_tables import TABLES as SPEED
from table import NOT_MEASURED, Table, each, text_of
from tables import TABLES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "eval" / "results"
MOST_RECORDS = 90
MADE = {table.name: table for table in SPEED}


def record(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"name": name, "rows": rows}))


@pytest.mark.parametrize(
    "cell, text",
    [
        ("{kl:.2f}", "0.50"),
        ("{kl:.2f}{se: (.1f)}", "0.50 (0.1)"),
        ("{kl:.2f}{other: (.1f)}", "0.50"),
        ("{kl:us.0f} us{se: (.1fx)}", "500 us (0.1x)"),
        ("{size:MiB.1f}", "2.0"),
        ("`{other}`", ""),
        ("{none:.2f}", ""),
        ("text", "text"),
    ],
)
def test_a_cell_is_empty_where_a_figure_is_missing_outside_of_brackets(cell: str, text: str):
    assert text_of(cell, {"kl": 0.5, "se": 0.1, "size": 2**21, "none": None}) == text


def test_rows_that_agree_in_the_first_cells_share_a_line(tmp_path):
    record(
        tmp_path, "a", {"x": 1, "key": "p", "ms": 1.0}, {"x": 1, "key": "q", "ms": 2.0}, {"x": 2, "key": "q", "ms": 3.0}
    )
    table = Table(
        "t",
        "a",
        "| x || {key}, ms || twice |",
        "| {x} || {ms} || {twice} |",
        each(twice=lambda row: 2 * row["x"]),
        "key",
    )
    assert table(tmp_path).splitlines() == [
        "| x | p, ms | q, ms | twice |",
        "| --- | --- | --- | --- |",
        "| 1 | 1.0 | 2.0 | 2 |",
        "| 2 |  | 3.0 | 4 |",
    ]
    ordered = Table("t", "a", "| x || {key} |", "| {x} || {ms} |", across="key", order=("q", "r", "p"))
    assert ordered(tmp_path).splitlines()[0] == "| x | q | p |"
    assert Table("t", "a", "| ms |", "| {ms} |", each(lambda row: row["x"] == 2))(tmp_path).splitlines()[2:] == [
        "| 3.0 |"
    ]


def test_rows_of_another_text_get_a_table_of_their_own(tmp_path):
    record(tmp_path, "a-1", {"model": "m", "kl": 1}, {"model": "n", "kl": 2})
    record(tmp_path, "a-2", {"model": "m", "kl": 3})
    record(tmp_path, "b", {"model": "o", "kl": 4})
    parts = Table("t", "a-*", "| KL |", "| {kl} |", split="**{model}**")(tmp_path).split("\n\n")
    assert parts == ["**m**", "| KL |\n| --- |\n| 1 |\n| 3 |", "**n**", "| KL |\n| --- |\n| 2 |"]
    assert Table("t", "c", "| KL |", "| {kl} |")(tmp_path) == NOT_MEASURED


def test_recipes_are_compared_with_their_parents_at_each_point(tmp_path):
    point = {"batch": 16, "context": 512, "packed": True}
    rows = [{**point, "way": way, "ms": ms} for way, ms in (("sinkq", 1.0), ("low2", 1.1), ("int8", 1.0))]
    record(tmp_path, "speed-recipes", *rows, {**point, "way": "low4", "error": "no"})
    assert MADE["recipes-speed"](tmp_path).splitlines()[0::2] == [
        "| setting | compared with | 16 x 512 |",
        "| `low2` | `sinkq` | +10.0% |",
    ]


def test_methods_in_turn_have_a_column_each(tmp_path):
    point = {"batch": 1, "context": 512, "room": 1}
    times = {"turbo:sink_num=0": (0.0125, 1.0, 1.0, 1.0), "turbo": (0.013, 1.04, 1.03, 1.05)}
    keys = ("ms", "ratio", "ratio_low", "ratio_high")
    rows = [{**point, "way": way, **dict(zip(keys, found, strict=True))} for way, found in times.items()]
    record(tmp_path, "speed-decode-in-turn", *rows)
    header, _, line = MADE["decode-in-turn"](tmp_path).splitlines()
    assert header == "| rows x tokens | `turbo:sink_num=0`, us | `turbo`, us |"
    assert line == "| 1 x 512 | 12.50 | 13.00 (1.040, 1.030 to 1.050) |"


def test_picked_figures_are_compared_and_left_out_where_one_is_missing(tmp_path):
    stock, ours = {"way": "model precision, sdpa", "tokens_per_s": 200.0}, {"way": "turbo:sink_num=0"}
    record(tmp_path, "speed-requests", stock, {**ours, "tokens_per_s": 800.0})
    record(tmp_path, "speed-eager", {**ours, "what": "step", "ms": 2.0, "stock_ms": 1.0})
    record(tmp_path, "long-prompts", {"method": "turbo:sink_num=0", "first_token_s": 1.0})
    assert MADE["calls-speed"](tmp_path).splitlines()[2:] == [
        "| step without a CUDA graph | `turbo:sink_num=0` | 2 ms | stock | 1 ms | 0.50x |",
        "| 256 requests in 4 GiB, tokens a second | `turbo:sink_num=0` | 800 | stock's pages | 200 | 4.00x |",
    ]
    latent = {"heads": 128, "rows": 1, "context": 32768, "impl": "triton"}
    record(tmp_path, "speed-latent", {**latent, "method": "stock", "ms": 3.0}, {**latent, "method": "turbo", "ms": 2.0})
    assert "| `turbo` | 2.00 ms | SDPA, bf16 | 3.00 ms | 1.50x |" in MADE["models-speed"](tmp_path)


def test_each_record_is_read_by_a_table_or_a_test():
    """What nothing reads is history, which git keeps."""
    patterns = [p for table in TABLES.values() if isinstance(table, Table) for p in table.records.split()]
    patterns.append("transformers-tests")  # two tables in one part
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    records = sorted(path.stem for path in RESULTS.glob("*.json"))
    read = {name for name in records if any(fnmatch(name, p) for p in patterns) or f"{name}.json" in tests}
    assert [name for name in records if name not in read] == [] and 0 < len(records) <= MOST_RECORDS


def test_each_table_is_shown_on_a_page():
    """A table that no page shows has no reader."""
    pages = [ROOT / "README.md", ROOT / "mkdocs.yml", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    assert [name for name in TABLES if f"<!-- table:{name} -->" not in text] == []
