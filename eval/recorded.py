"""Recorded results as Markdown: what the makers of tables share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Result = dict[str, Any]
# What the quality measurement reports of a method; every other key of a row is one of the method's settings.
FIGURES = {
    "model", "method", "kl", "same_top1", "ppl", "ppl_change_pct", "se_pct", "packed_tokens", "effective_bits",
    "effective_bits_total", "kv_bytes", "impl", "sums", "recall", "sums_lost_won", "recall_lost_won", "head_dim",
    "kv_heads", "tokens",
}  # fmt: skip
SHOWN = ("torch", "transformers", "triton")  # versions that a page names


def load(results: Path, prefix: str) -> list[Result]:
    """Recorded results whose name starts with `prefix`, by name."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob(f"{prefix}*.json"))]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def conditions(results: Path, *prefixes: str) -> str:
    """One line for a page: on what its figures were recorded; notes of single records follow as a list.

    Commands, versions and dates of each record stand in its JSON file.
    """
    found = [result for prefix in prefixes for result in load(results, prefix)]
    if not found:
        return "Not measured yet."
    dates: dict[str, list[str]] = {}
    for result in found:
        used = [f"{name} {result['versions'][name]}" for name in SHOWN if result["versions"].get(name)]
        dates.setdefault(", ".join([result["device"], *used]), []).append(result["date"])
    where = "; ".join(f"{name} ({_days(days)})" for name, days in dates.items())
    files = ", ".join(f"`eval/results/{prefix}*.json`" for prefix in prefixes)
    notes: dict[str, list[str]] = {}
    for result in found:
        if "note" in result:
            notes.setdefault(result["note"], []).append(f"`{result['name']}`")
    listed = [f"- {', '.join(names)}: {note}." for note, names in notes.items()]
    return "\n".join([f"Recorded on {where}. Commands and versions: {files}.", *(["", *listed] if listed else [])])


def _days(dates: list[str]) -> str:
    first, last = min(dates), max(dates)
    return first if first == last else f"{first} to {last}"


def settings(row: dict[str, Any]) -> dict[str, Any]:
    """Those of the method, among the figures of a row of quality or of bits."""
    return {key: value for key, value in row.items() if key not in FIGURES}


def asked(row: dict[str, Any]) -> str:
    """`turbo`, or `turbo:k_bits=4,v_bits=2`: as the commands take it."""
    given = ",".join(f"{key}={_as_yaml(value)}" for key, value in settings(row).items())
    return f"{row['method']}:{given}" if given else row["method"]


def _as_yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
