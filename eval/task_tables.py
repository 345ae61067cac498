"""Tables of lm-eval's tasks: what they are, and what `eval/results/tasks-*.json` holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from recorded import Result, load, markdown

TASKS = Path(__file__).resolve().parent / "tasks"
# columns of a score: task, metric and filter, the heading, and how a value is written
SCORES = (
    ("sums", "exact_match", "strict-match", "sums", ".3f"),
    *((f"recall_{n}", "exact_match", "first-number", f"recall {n}", ".3f") for n in (10, 40, 100)),
    ("wikitext", "word_perplexity", "none", "WikiText-2, a word", ".1f"),
)


def tasks_table(results: Path) -> str:
    """The task files, each by the comment that it begins with."""
    rows = []
    for path in sorted(TASKS.glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        about = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
        name = re.search(r"^(?:group|task): (\S+)$", text, re.MULTILINE)
        rows.append([f"`{name[1] if name else path.stem}`", about])
    return markdown(["task", "what it is"], rows)


def scores_table(results: Path) -> str:
    """Shares of right answers and perplexity by task, all read through the packed cache, per model and method."""
    groups: dict[str, list[Result]] = {}
    for result in load(results, "tasks-"):
        groups.setdefault(Path(result["rows"][0]["model"]).name, []).append(result)
    parts = []
    for model, recorded in groups.items():
        scored: dict[str, dict[tuple[str, str, str], dict[str, Any]]] = {}
        for row in (row for result in recorded for row in result["rows"]):
            scored.setdefault(row["method"], {})[row["task"], row["metric"], row["filter"]] = row
        rows = [
            ["full precision" if name == "full" else f"`{name}`", *_cells(found)]
            for name, found in sorted(scored.items(), key=lambda item: item[0] != "full")
        ]
        header = ["cache", *(title for *_, title, _ in SCORES), "read packed", "bits, closed blocks", "KV"]
        parts.append(f"**{model}**\n\n{markdown(header, rows)}")
    return "\n\n".join(parts) or "Not measured yet."


def _cells(found: dict[tuple[str, str, str], dict[str, Any]]) -> list[str]:
    """Scores with their standard errors; then of the perplexity's tokens which part read packed ones, and of its caches
    how many bits a value have where closed, and their share of full precision's bytes."""
    cells = []
    for task, metric, kind, _, form in SCORES:
        row = found.get((task, metric, kind))
        error = f" ({row['stderr']:{form}})" if row and row["stderr"] is not None else ""
        cells.append(f"{row['value']:{form}}{error}" if row else "")
    read = found.get(SCORES[-1][:3])
    if read is None or read["effective_bits"] is None:
        return [*cells, "", "", ""]
    share = read["scored_through_packed"] / read["scored"]
    return [*cells, f"{share:.0%}", f"{read['effective_bits']:.3f}", f"{read['kv_share']:.2f}x"]
