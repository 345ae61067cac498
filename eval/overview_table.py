"""The README's first table: what each setting keeps, loses and gains, together out of several records."""

from __future__ import annotations

from pathlib import Path

from recorded import Result, asked, load, markdown

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
    decode, prefill = (
        _gains(load(results, f"speed-{bench}"), point)
        for bench, point in (
            ("decode", {"batch": BATCH, "context": CONTEXT}),
            ("prefill", {"batch": 1, "tokens": PROMPT}),
        )
    )
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


def _gains(found: list[Result], point: dict[str, int]) -> dict[str, float]:
    """At one point, how many times faster a way is than the fastest attention of PyTorch there."""
    rows = [row for result in found for row in result["rows"] if "ms" in row and row.get("room", 1) == 1]
    here = {row["way"]: row["ms"] for row in rows if all(row[key] == value for key, value in point.items())}
    best = min((ms for way, ms in here.items() if way.startswith("sdpa") and "packed" not in way), default=0.0)
    return {way: best / ms for way, ms in here.items() if not way.startswith("sdpa")}
