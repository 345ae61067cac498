"""A generation that outgrew its memory (`eval/budget.py`), and latent attention compared with stock."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from recorded import load, markdown

NOT_MEASURED = "Not measured yet."
MIB = 2**20


def outgrown_table(results: Path) -> str:
    """A generation that outgrew its memory, beside fixed bits."""
    rows = [row for result in load(results, "budget-generate") for row in result["rows"]]
    lines = [
        [
            _named(row),
            str(row["tokens"]),
            f"{row['bf16_bytes'] / MIB:.0f}",
            f"{row['most_bytes'] / MIB:.1f}",
            f"{row['effective_bits']:.2f}",
            f"{row['seconds']:.1f}",
            f"{row['ms_a_token']:.2f}",
            _changes(row),
        ]
        for row in rows
    ]
    header = ["cache", "tokens", "bf16, MiB", "most, MiB", "bits in the end", "seconds", "ms a token", "repacked"]
    return markdown(header, lines) if rows else NOT_MEASURED


def _named(row: dict[str, Any]) -> str:
    """The setting of a row, and whether its kernels were compiled meanwhile."""
    name = f"`memory`, {row['memory'] / MIB:.0f} MiB" if row["memory"] else f"`{row['setting']}`"
    return f"{name}, first of a process" if row["run"] == "cold" else name


def _changes(row: dict[str, Any]) -> str:
    """How often bits changed, and the longest pause of a step around that."""
    bits = [(change["k"], change["v"]) for change in row["changes"]]
    times = sum(one != other for one, other in pairwise(bits))
    return f"{times} times, {row['pauses_ms'][0]:.0f} ms at most" if times else ""


def latent_table(results: Path) -> str:
    """Times of one layer of latent attention, and how many times the speed of the stock cache's that is."""
    rows = [row for result in load(results, "speed-latent") for row in result["rows"]]
    names = list(dict.fromkeys((row["method"], row["impl"]) for row in rows))
    points: dict[tuple[int, ...], dict[tuple[str, str], float]] = {}
    for row in rows:
        point = row["heads"], row["rows"], row["context"], row["new_tokens"]
        points.setdefault(point, {})[row["method"], row["impl"]] = row["ms"]
    lines = []
    for (heads, batch, context, new), found in points.items():
        where = f"{batch} x {context}, a step" if new == 1 else f"{batch} x {new}, a prompt"
        stock = found["stock", "sdpa"]
        cells = [f"{ms:.3f} ({stock / ms:.2f}x)" if (ms := found.get(name)) else "" for name in names[1:]]
        lines.append([str(heads), where, f"{stock:.3f}", *cells])
    shown = [f"`{method}`{', reference' if impl == 'reference' else ''}, ms" for method, impl in names[1:]]
    return markdown(["query heads", "rows x tokens", "stock by SDPA, ms", *shown], lines) if rows else NOT_MEASURED
