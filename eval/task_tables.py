"""Tables of tasks: scores of released models and of small trained ones, tool calls, fine-tuning, and the task files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from quality_tables import TRAINED
from recorded import Result
from table import Row, Table, every_row, markdown, text_of

FILES = Path(__file__).resolve().parent / "tasks"
# Tasks of `eval/task_scores.py` as columns: heading, and how a score is written.
TASKS: dict[str, tuple[str, str]] = {
    "gsm8k": ("GSM8K", ".1%"),
    "bbh": ("BBH", ".1%"),
    "longbench": ("LongBench, multi_news", ".3f"),
    "tools": ("tool calls", ".1%"),
}
# Scores of the small models: task, metric and filter, the heading, and how a value is written.
SCORES: dict[tuple[str, str, str], tuple[str, str]] = {
    ("sums", "exact_match", "strict-match"): ("sums", ".3f"),
    **{(f"recall_{n}", "exact_match", "first-number"): (f"recall {n}", ".3f") for n in (10, 40, 100)},
    ("wikitext", "word_perplexity", "none"): ("WikiText-2, a word", ".1f"),
}


def tasks_table(results: Path) -> str:
    """The task files, each by the comment that it begins with."""
    rows = []
    for path in sorted(FILES.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        about = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
        name = re.search(r"^(?:group|task): (\S+)$", text, re.MULTILINE)
        rows.append([f"`{name[1] if name else path.stem}`", about])
    return markdown(["task", "what it is"], rows)


def scored(results: list[Result]) -> list[Row]:
    """Recorded rows by model, in the order of the records; full precision first, then by bits, most first.

    Of a row that was recorded twice the later record's stays. Rows of units that failed are left out. `most` are the
    bits of a setting by all its tasks.
    """
    found: dict[tuple[str, str, str], Row] = {}
    for row in (row for row in every_row(results) if "error" not in row):
        found[row["model"], row["setting"], row["task"]] = row
    models = list(dict.fromkeys(model for model, *_ in found))
    most: dict[tuple[str, str], float] = {}
    for (*key, _), row in found.items():
        most[key[0], key[1]] = max(most.get((key[0], key[1]), 0.0), row["bits"] or 0.0)
    rows = [row | {"most": most[row["model"], row["setting"]] or None} for row in found.values()]
    return sorted(rows, key=lambda row: (models.index(row["model"]), *_by_bits(row)))


def _by_bits(row: Row) -> tuple[bool, float, str]:
    return row["setting"] != "full", -(row["most"] or 0.0), row["setting"]


def named(setting: str) -> str:
    return "full precision" if setting == "full" else f"`{setting}`"


def _held(row: Row) -> str:
    return f"{row['holds_to']:,} tokens" if row["holds_to"] else "not at the shortest"


def _task_scores(results: list[Result]) -> Iterable[Row]:
    rows = scored(results)
    asked: dict[str, dict[str, int]] = {}
    for row in rows:
        of = asked.setdefault(row["model"], {})
        of[row["task"]] = max(of.get(row["task"], 0), row["questions"])
    for row in rows:
        title, form = TASKS[row["task"]]
        of = asked[row["model"]]
        questions = ", ".join(f"{TASKS[task][0]} {of[task]:,}" for task in TASKS if task in of)
        found = text_of(f"{{score:{form}}}{{stderr: ({form})}}", row)
        yield row | {"title": title, "found": found, "asked": questions, "cache": named(row["setting"])}


def _tool_calls(results: list[Result]) -> Iterable[Row]:
    """Yield a row for each length: shares of tool calls equal to full precision's, first among its correct calls."""
    calls = [row for row in scored(results) if row["task"] == "tools"]
    lengths = {row["model"]: list(row["agrees_by_length"]) for row in calls if "agrees_by_length" in row}
    for row in (row for row in calls if row["setting"] == "full" or "agrees_by_length" in row):
        for n in lengths.get(row["model"], []):
            if row["setting"] == "full":
                shown = {"cache": "right in full precision", "share": row[f"tokens_{n}"], "held": ""}
            else:
                share = row["agrees_by_length"].get(n, 0)
                shown = {"cache": named(row["setting"]), "share": share, "held": _held(row)}
            yield {"model": row["model"], "length": n, **shown}


def _chosen(results: list[Result]) -> Iterable[Row]:
    """The same in short: agreement on questions, and what tool calls hold to."""
    rows = [row for row in scored(results) if row["task"] != "longbench" and "agrees" in row]
    most = {row["setting"]: row["most"] for row in rows}
    models = list(dict.fromkeys(row["model"] for row in rows))
    for row in sorted((row | {"most": most[row["setting"]]} for row in rows), key=_by_bits):
        column = models.index(row["model"]), list(TASKS).index(row["task"])
        found = _held(row) if row["task"] == "tools" else text_of(AGREES, row)
        yield row | {"title": f"{TASKS[row['task']][0]}, {row['model']}", "column": column, "found": found}


def _small(results: list[Result]) -> Iterable[Row]:
    """Rows of full precision and of some settings, with what the caches of the last task's texts held."""
    rows = [row | {"model": Path(row["model"]).name, "key": (row["task"], row["metric"], row["filter"])}
            for row in every_row(results)]  # fmt: skip
    held = {(row["model"], row["method"]): row for row in rows if row.get("effective_bits") is not None}
    order = ("full", *TRAINED)
    for row in sorted((row for row in rows if row["method"] in order), key=lambda row: order.index(row["method"])):
        if row["key"] in SCORES:
            title, form = SCORES[row["key"]]
            of = held.get((row["model"], row["method"]), {})
            of = {"bits": of["effective_bits"], "kv": of["kv_share"], "read": of["scored_through_packed"] / of["scored"]
                  } if of else {}  # fmt: skip
            found = text_of(f"{{value:{form}}}{{stderr: ({form})}}", row)
            yield row | of | {"cache": named(row["method"]), "title": title, "found": found}


AGREES = "{agrees:.1%}{agrees_stderr: (.1%)}"
TABLES = (
    Table("task-scores", "task-scores-*",
          "| cache | bits || {title} | agrees |",
          f"| {{cache}} | {{most:.2f}} || {{found}} | {AGREES} |",
          _task_scores, "task", tuple(TASKS), "**{model}**, questions: {asked}"),
    Table("tool-calls", "task-scores-*",
          "| cache || {length} || holds to |",
          "| {cache} || {share:.0%} || {held} |",
          _tool_calls, "length", split="**{model}**"),
    Table("chosen-tasks", "task-scores-*",
          "| setting | bits || {title} |",
          "| `{setting}` | {most:.2f} || {found} |",
          _chosen, "column", sorted),
    Table("fine-tunes", "fine-tune-*",
          "| model | data | steps | tokens | loss | seconds |",
          "| {model} | {data} | {steps:,} | {tokens:M.1f} M | {loss_first:.3f} to {loss_last:.3f} | {seconds:.0f} |"),
    Table("scores", "tasks-*",
          "| cache || {title} || read packed | bits, closed blocks | KV |",
          "| {cache} || {found} || {read:.0%} | {bits:.3f} | {kv:.2f}x |",
          _small, "key", tuple(SCORES), "**{model}**"),
)  # fmt: skip
