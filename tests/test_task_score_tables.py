"""Tables of tasks on released models, from whole, partial and no records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from task_tables import TABLES

MADE = {table.name: table for table in TABLES}


def record(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    head = {"name": name, "command": "python", "date": "2030-01-02", "device": "GPU", "versions": {}}
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({**head, "rows": rows}))


def row(setting: str, task: str, model: str = "net", **figures: Any) -> dict[str, Any]:
    figures = {"score": 0.25, "stderr": 0.01, "questions": 1319, "bits": None, **figures}
    return {"model": model, "task": task, "setting": setting, **figures}


AGREES = {"agrees": 0.9, "agrees_stderr": 0.02, "bits": 4.3}
CALLS = {**AGREES, "agrees_by_length": {"1024": 0.98, "2048": 0.5}, "holds_to": 1024, "questions": 100}


def test_without_records_tables_say_so(tmp_path):
    assert {table(tmp_path) for table in TABLES} == {"Not measured yet."}


def test_scores_stand_with_their_errors_and_agreement_and_full_precision_comes_first(tmp_path):
    packed = [row("low2", "gsm8k", **{**AGREES, "bits": 2.4}), row("turbo", "gsm8k", **AGREES)]
    record(tmp_path, "task-scores-a", *packed, row("full", "gsm8k"), row("full", "bbh", questions=2700, stderr=None))
    text = MADE["task-scores"](tmp_path)
    assert text.startswith("**net**, questions: GSM8K 1,319, BBH 2,700\n")
    assert text.splitlines()[-3:] == [
        "| full precision |  | 25.0% (1.0%) |  | 25.0% |  |",
        "| `turbo` | 4.30 | 25.0% (1.0%) | 90.0% (2.0%) |  |  |",
        "| `low2` | 2.40 | 25.0% (1.0%) | 90.0% (2.0%) |  |  |",
    ]


def test_a_failed_unit_leaves_its_cells_empty_and_a_later_record_fills_them(tmp_path):
    failed = {"model": "net", "task": "gsm8k", "setting": "turbo", "error": "OutOfMemoryError"}
    record(tmp_path, "task-scores-a", row("full", "gsm8k"), failed)
    assert "turbo" not in MADE["task-scores"](tmp_path)
    record(tmp_path, "task-scores-b", row("turbo", "gsm8k", **AGREES))
    assert "| `turbo` | 4.30 | 25.0% (1.0%) | 90.0% (2.0%) |" in MADE["task-scores"](tmp_path)


def test_rows_without_full_precision_have_no_agreement(tmp_path):
    record(tmp_path, "task-scores-a", row("turbo", "gsm8k", bits=4.3), row("turbo", "tools", bits=4.3))
    assert "| `turbo` | 4.30 | 25.0% (1.0%) |  | 25.0% (1.0%) |  |" in MADE["task-scores"](tmp_path)
    assert MADE["tool-calls"](tmp_path) == MADE["chosen-tasks"](tmp_path) == "Not measured yet."


def test_tool_calls_are_told_by_length(tmp_path):
    record(
        tmp_path,
        "task-scores-a",
        row("full", "tools", tokens_1024=0.96, tokens_2048=0.8),
        row("turbo", "tools", **CALLS),
        row("low2", "tools", **{**CALLS, "holds_to": 0}),
    )
    assert MADE["tool-calls"](tmp_path).splitlines()[2:] == [
        "| cache | 1024 | 2048 | holds to |",
        "| --- | --- | --- | --- |",
        "| right in full precision | 96% | 80% |  |",
        "| `low2` | 98% | 50% | not at the shortest |",
        "| `turbo` | 98% | 50% | 1,024 tokens |",
    ]


def test_the_short_table_has_a_column_for_each_model_and_task(tmp_path):
    record(tmp_path, "task-scores-a", row("turbo", "gsm8k", **AGREES), row("full", "gsm8k"))
    record(tmp_path, "task-scores-b", row("turbo", "tools", "tuned", **CALLS), row("low2", "tools", "tuned", **CALLS))
    assert MADE["chosen-tasks"](tmp_path).splitlines() == [
        "| setting | bits | GSM8K, net | tool calls, tuned |",
        "| --- | --- | --- | --- |",
        "| `low2` | 4.30 |  | 1,024 tokens |",
        "| `turbo` | 4.30 | 90.0% (2.0%) | 1,024 tokens |",
    ]


def test_a_fine_tuning_is_told(tmp_path):
    tuned = {"model": "net", "data": "gsm8k", "steps": 1200, "tokens": 5_690_000, "seconds": 31.4}
    record(tmp_path, "fine-tune-gsm8k", {**tuned, "loss_first": 1.2345, "loss_last": 0.5})
    assert "| net | gsm8k | 1,200 | 5.7 M | 1.234 to 0.500 | 31 |" in MADE["fine-tunes"](tmp_path)
