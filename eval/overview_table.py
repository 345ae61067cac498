"""The README's first table: what each setting keeps, loses and gains, together out of several records."""

from __future__ import annotations

from pathlib import Path

from recorded import asked, load, markdown

from qattn_hf.bench.tables import gains

CONTEXT, BATCH, PROMPT, HEAD_DIM = 32768, 16, 16384, 128


def overview_table(results: Path) -> str:
    """A line for every setting whose bits and quality are recorded, fewest bits first."""
    bits = {
        asked(row): row["effective_bits_total"]
        for result in load(results, "bits")
        for row in result["rows"]
        if (row["tokens"], row["head_dim"]) == (CONTEXT, HEAD_DIM)
    }
    losses: dict[str, dict[str, float]] = {}
    for row in (row for result in load(results, "quality-full-") for row in result["rows"] if "kl" in row):
        losses.setdefault(row["model"], {})[asked(row)] = row["kl"]
    decode = _gains(results, "decode", {"batch": BATCH, "context": CONTEXT, "room": 1})
    prefill = _gains(results, "prefill", {"batch": 1, "tokens": PROMPT})
    known = [
        name for name in sorted(bits, key=lambda name: bits[name]) if all(name in found for found in losses.values())
    ]
    rows = [
        [
            f"`{name}`",
            f"{bits[name]:.2f}",
            *(f"{found[name]:.5f}" for found in losses.values()),
            *(f"{found[name]:.2f}x" if name in found else "" for found in (decode, prefill)),
        ]
        for name in known
    ]
    header = ["method", "bits a value", *(f"KL, {model}" for model in losses), "decode", "prefill"]
    return markdown(header, rows) if rows and losses else "Not measured yet."


def _gains(results: Path, bench: str, point: dict[str, int]) -> dict[str, float]:
    """At one point, how many times faster a way is than the fastest attention of PyTorch there."""
    rows = [row for result in load(results, f"speed-{bench}") for row in result["rows"]]
    return gains(rows, *point).get(tuple(point.values()), {})
