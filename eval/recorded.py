"""Recorded results as Markdown: what the makers of the README's tables share."""

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


def settings(row: dict[str, Any]) -> dict[str, Any]:
    """Those of the method, among the figures of a row of quality or of bits."""
    return {key: value for key, value in row.items() if key not in FIGURES}


def asked(row: dict[str, Any]) -> str:
    """`turbo`, or `turbo:k_bits=4,v_bits=2`: as the commands take it."""
    given = ",".join(f"{key}={value}" for key, value in settings(row).items())
    return f"{row['method']}:{given}" if given else row["method"]
