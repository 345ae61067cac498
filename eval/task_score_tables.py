"""Tables of tasks on released models: what `task-scores-*` and `fine-tune-*` of `eval/results` hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from recorded import Result, load, markdown

# Tasks of `eval/task_scores.py` as columns: heading, and how a score is written.
TASKS: dict[str, tuple[str, str]] = {
    "gsm8k": ("GSM8K", ".1%"),
    "bbh": ("BBH", ".1%"),
    "longbench": ("LongBench, multi_news", ".3f"),
    "tools": ("tool calls", ".1%"),
}
NOTHING = "Not measured yet."
Rows = dict[str, dict[str, Result]]  # by setting, then by task


def scored(results: Path) -> dict[str, Rows]:
    """Recorded rows by model, in the order of the records; full precision first, then by bits, most first.

    Of a row that was recorded twice the later record's stays. Rows of units that failed are left out.
    """
    found: dict[str, Rows] = {}
    for record in load(results, "task-scores-"):
        for row in record["rows"]:
            if "error" not in row:
                found.setdefault(row["model"], {}).setdefault(row["setting"], {})[row["task"]] = row
    return {model: dict(sorted(rows.items(), key=_by_bits)) for model, rows in found.items()}


def _by_bits(item: tuple[str, dict[str, Result]]) -> tuple[bool, float, str]:
    setting, tasks = item
    return setting != "full", -_bits(tasks), setting


def _bits(tasks: dict[str, Result]) -> float:
    return max((row["bits"] for row in tasks.values() if row["bits"] is not None), default=0.0)


def task_scores_table(results: Path) -> str:
    """Of each model and setting, the score of each task with its standard error, and the share of answers that are full
    precision's."""
    parts = []
    for model, rows in scored(results).items():
        asked = [task for task in TASKS if any(task in tasks for tasks in rows.values())]
        header = ["cache", "bits", *(title for task in asked for title in (TASKS[task][0], "agrees"))]
        lines = [
            [_named(setting), _bits_cell(tasks), *(cell for task in asked for cell in _cells(task, tasks.get(task)))]
            for setting, tasks in rows.items()
        ]
        counts = {
            TASKS[task][0]: max(tasks[task]["questions"] for tasks in rows.values() if task in tasks) for task in asked
        }
        questions = ", ".join(f"{title} {count:,}" for title, count in counts.items())
        parts.append(f"**{model}**, questions: {questions}\n\n{markdown(header, lines)}")
    return "\n\n".join(parts) or NOTHING


def tool_calls_table(results: Path) -> str:
    """Of each model and setting, the share of tool calls that are full precision's by length, and what is held to."""
    parts = []
    for model, rows in scored(results).items():
        calls = {
            setting: tasks["tools"] for setting, tasks in rows.items() if "agrees_by_length" in tasks.get("tools", {})
        }
        if not calls:
            continue
        lengths = list(next(iter(calls.values()))["agrees_by_length"])
        lines = [
            [_named(setting), *(f"{row['agrees_by_length'].get(length, 0):.0%}" for length in lengths), _held(row)]
            for setting, row in calls.items()
        ]
        full = rows.get("full", {}).get("tools")
        if full is not None:
            lines.insert(0, ["right in full precision", *(f"{full[f'tokens_{n}']:.0%}" for n in lengths), ""])
        parts.append(f"**{model}**\n\n{markdown(['cache', *lengths, 'holds to'], lines)}")
    return "\n\n".join(parts) or NOTHING


def chosen_tasks_table(results: Path) -> str:
    """The same in short, a column for each model and task: agreement on questions, and what tool calls hold to."""
    models = scored(results)
    columns: list[tuple[str, str, str, Callable[[Result], str]]] = []
    for model, rows in models.items():
        for task, (title, _) in TASKS.items():
            if task != "longbench" and any("agrees" in tasks.get(task, {}) for tasks in rows.values()):
                columns.append((model, task, f"{title}, {model}", _held if task == "tools" else _agrees))
    settings = {setting: tasks for rows in models.values() for setting, tasks in rows.items() if setting != "full"}
    if not columns:
        return NOTHING
    lines = [
        [
            f"`{setting}`",
            _bits_cell(tasks),
            *(_cell(models[model].get(setting, {}).get(task), show) for model, task, _, show in columns),
        ]
        for setting, tasks in sorted(settings.items(), key=_by_bits)
    ]
    return markdown(["setting", "bits", *(title for *_, title, _ in columns)], lines)


def fine_tunes_table(results: Path) -> str:
    """How the copies were fine-tuned."""
    rows = [row for record in load(results, "fine-tune-") for row in record["rows"]]
    lines = [
        [
            row["model"],
            row["data"],
            f"{row['steps']:,}",
            f"{row['tokens'] / 1e6:.1f} M",
            f"{row['loss_first']:.3f} to {row['loss_last']:.3f}",
            f"{row['seconds']:.0f}",
        ]
        for row in rows
    ]
    return markdown(["model", "data", "steps", "tokens", "loss", "seconds"], lines) if lines else NOTHING


def _named(setting: str) -> str:
    return "full precision" if setting == "full" else f"`{setting}`"


def _bits_cell(tasks: dict[str, Result]) -> str:
    return f"{_bits(tasks):.2f}" if _bits(tasks) else ""


def _cells(task: str, row: Result | None) -> list[str]:
    """Score with its standard error, and agreement with its own; empty where there is none."""
    if row is None:
        return ["", ""]
    form = TASKS[task][1]
    error = f" ({row['stderr']:{form}})" if row["stderr"] is not None else ""
    return [f"{row['score']:{form}}{error}", _agrees(row) if "agrees" in row else ""]


def _agrees(row: Result) -> str:
    error = f" ({row['agrees_stderr']:.1%})" if row.get("agrees_stderr") is not None else ""
    return f"{row['agrees']:.1%}{error}"


def _held(row: Result) -> str:
    return f"{row['holds_to']:,} tokens" if row["holds_to"] else "not at the least"


def _cell(row: Result | None, show: Callable[[Result], str]) -> str:
    return show(row) if row is not None and "agrees" in row else ""
