"""Recorded results as Markdown: what the makers of the README's tables share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def load(results: Path, prefix: str) -> list[Result]:
    """Recorded results whose name starts with `prefix`, by name."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob(f"{prefix}*.json"))]


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def origin(result: Result) -> str:
    """One line under a table: how its figures came about."""
    used = ", ".join(f"{name} {value}" for name, value in result["versions"].items() if value)
    note = f" Note: {result['note']}." if "note" in result else ""
    return f"`{result['command']}`, {result['date']}, {result['device']}, {used}.{note}"
