"""Results of `qattn eval` (`run.rows`) as a table."""

from __future__ import annotations

from typing import Any

from qattn_hf.messages import size
from qattn_hf.messages.console import print_figures, results_console

COLUMNS = ("method", "task", "metric", "value", "stderr", "agrees", "n", "packed", "bits", "KV bytes", "tokens/s")


def print_table(rows: list[dict[str, Any]], wide: bool = False) -> None:
    """Print one line for each metric, with the usage of its task's caches."""
    console = results_console()
    print_figures(COLUMNS, [_cells(row) for row in rows], COLUMNS[:3], wide)
    console.print("agrees: share of rows answered as full precision answers them; it needs --method full.")
    console.print("packed: share of scored tokens, or of answers, that read packed tokens. KV bytes: mean of a batch.")
    for line in dict.fromkeys(_held(row) for row in rows if "holds_to" in row):
        console.print(line)


def _held(row: dict[str, Any]) -> str:
    """Say up to which context length a method answers as full precision does."""
    shares = ", ".join(f"{length} tokens {share:.0%}" for length, share in row["agrees_by_length"].items())
    far = f"holds to {row['holds_to']} tokens" if row["holds_to"] else "does not hold at the least length"
    return f"{row['method']}, {row['task']}: {far} (agrees: {shares})"


def _cells(row: dict[str, Any]) -> list[str]:
    metric = row["metric"] if row["filter"] == "none" else f"{row['metric']}, {row['filter']}"
    cells = [row["method"], row["task"], metric, f"{row['value']:.4f}"]
    cells += ["" if row["stderr"] is None else f"{row['stderr']:.4f}"]
    cells += [f"{row['agrees']:.0%}" if "agrees" in row else "", "" if row["n"] is None else str(row["n"])]
    if "requests" not in row:  # a group
        return cells + [""] * 4
    counts = ("scored_through_packed", "scored") if "scored" in row else ("packed_requests", "requests")
    part, whole = (row[count] for count in counts)
    bits, speed = row["effective_bits"], row["tokens_per_second"]
    cells += [f"{part / max(1, whole):.0%}", "" if bits is None else f"{bits:.2f}", size(row["kv_bytes"])]
    return [*cells, "" if speed is None else f"{speed:.1f}"]
