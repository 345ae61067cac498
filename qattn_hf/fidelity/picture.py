"""Rows of `qattn compare` as a picture; matplotlib is loaded only here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qattn_hf.fidelity.compare import Row

FLOOR = 1e-7  # of a KL on a logarithmic axis: below is what the order of sums does to fp32
WHICH = ("average", "worst")
MARKERS = "os^Dv<>P*"  # not as many as colours, so that both together repeat late


def draw(rows: list[Row], target: Path, title: str) -> None:
    """Quality against bits: KL with the Pareto front, and the error of attention, average and worst layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    figure.suptitle(title)
    kl, attention = figure.subplots(1, 2)
    bits = [row["effective_bits_total"] for row in rows]
    losses = [max(row["kl"], FLOOR) for row in rows]
    _points(kl, rows, bits, losses)
    front = sorted((x, y) for x, y, row in zip(bits, losses, rows, strict=True) if row["pareto"])
    kl.plot(*zip(*front, strict=True), color="gray", linestyle="--", linewidth=1, zorder=0, label="Pareto front")
    kl.set_ylabel("KL to full precision, nats a token")
    average, worst = ([max(row["attention"][which]["relative_l1"], FLOOR) for row in rows] for which in WHICH)
    _points(attention, rows, bits, average)
    attention.vlines(bits, average, worst, color="gray", linewidth=1, zorder=0, label="up to the worst layer")
    attention.set_ylabel("attention output, relative L1 error")
    for panel in (kl, attention):
        panel.set(xlabel=f"bits a value at {rows[0]['at_tokens']} tokens, everything counted", yscale="log")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.3)
    named = [panel.get_legend_handles_labels() for panel in (kl, attention)]
    lines = {label: line for found in named for line, label in zip(*found, strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize="small")
    figure.savefig(target, dpi=150)


def _points(panel: Any, rows: list[Row], x: list[float], y: list[float]) -> None:
    """Each method in a colour and a shape of its own, for those who cannot tell the colours apart."""
    for i, row in enumerate(rows):
        panel.scatter(x[i], y[i], label=row["method"], color=f"C{i % 10}", marker=MARKERS[i % len(MARKERS)])
