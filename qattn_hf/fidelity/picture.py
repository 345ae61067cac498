"""What `qattn compare` and `qattn tune` found as pictures; matplotlib is loaded only here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from qattn_hf.fidelity.compare import Row

FLOOR = 1e-7  # of a KL on a logarithmic axis: below is what the order of sums does to fp32
WIDE = 4  # times as many bits, from which on their axis is logarithmic
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
        if max(bits) > WIDE * min(bits):  # else there may be no power of two to write at the axis
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


def draw_sensitivity(trials: list[Row], chosen: list[str], target: Path, title: str) -> None:
    """KL of each candidate in each layer alone, the chosen ones framed, and what 2 bits in one head add to it.

    Args:
        trials: as in `Tuned.trials`. chosen: the candidate of each layer.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["candidate"] for row in trials))
    whole = {(row["layer"], row["candidate"]): row["kl"] for row in trials if not row["side"]}
    heads = list(dict.fromkeys((row["candidate"], row["side"], row["head"]) for row in trials if row["side"]))
    more = {
        (row["layer"], (row["candidate"], row["side"], row["head"])): row["kl"] - whole[row["layer"], row["candidate"]]
        for row in trials
        if row["side"]
    }
    widths = [1.1 * len(names), *([max(1.0, 0.35 * len(heads))] if heads else [])]
    figure = Figure(figsize=(3 + sum(widths), 2 + 0.25 * len(chosen)), layout="constrained")
    figure.suptitle(title)
    candidates, *by_head = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    _heat(figure, candidates, whole, names, len(chosen), "KL of the layer alone")
    for layer, name in enumerate(chosen):
        candidates.add_patch(_frame(names.index(name), layer))
    broken = [name.replace(":", "\n").replace(",", "\n") for name in names]
    candidates.set_xticks(range(len(names)), broken, fontsize="x-small")
    short = {name: chr(ord("a") + i) for i, name in enumerate(dict.fromkeys(head[0] for head in heads))}
    for panel in by_head:
        _heat(figure, panel, more, heads, len(chosen), "KL that 2 bits in one head add")
        panel.set_xticks(
            range(len(heads)), [f"{short[n]} {s}{h}" for n, s, h in heads], rotation=90, fontsize="x-small"
        )
        panel.set_xlabel("\n".join(f"{letter}: {name}" for name, letter in short.items()), fontsize="x-small")
    figure.savefig(target, dpi=150)


def _heat(figure: Any, panel: Any, found: dict[Any, float], columns: list[Any], layers: int, title: str) -> None:
    """Layers downwards, columns across; what was not tried stays white."""
    from matplotlib.colors import LogNorm

    grid = [[max(found.get((layer, column), math.nan), FLOOR) for column in columns] for layer in range(layers)]
    figure.colorbar(panel.imshow(grid, aspect="auto", norm=LogNorm(), cmap="viridis"), ax=panel)
    panel.set(title=title, ylabel="layer")
    panel.set_yticks(range(layers))


def _frame(column: int, row: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2)
