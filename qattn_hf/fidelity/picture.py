"""Plots of the results of `qattn compare` and `qattn tune`. matplotlib is imported when a plot is drawn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from qattn_hf.errors import QAttnError
from qattn_hf.fidelity.compare import Row

MIN_KL = 1e-7  # lower end of the logarithmic axis; smaller values are fp32 rounding
LOG_RATIO = 4  # ratio of most to fewest bits from which the axis of bits is logarithmic
WHICH = ("average", "worst")
MARKERS = "os^Dv<>P*"  # nine, with ten colours: a pair repeats after 90 methods


def draw(rows: list[Row], target: Path, title: str) -> None:
    """Plot loss over bits: KL with the Pareto front, and the error of attention outputs, average and worst layer.

    Args:
        rows: as `compare` returns them.
        target: image file to write, such as a .png.

    Raises:
        QAttnError: a row was not measured layer by layer.
    """
    if lacking := [row["method"] for row in rows if "attention" not in row]:
        raise QAttnError(f"no errors of attention were measured for {lacking[0]}: compare with by_layer=True")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    figure.suptitle(title)
    kl, attention = figure.subplots(1, 2)
    bits = [row["effective_bits_total"] for row in rows]
    losses = [max(row["kl"], MIN_KL) for row in rows]
    _points(kl, rows, bits, losses)
    front = sorted((x, y) for x, y, row in zip(bits, losses, rows, strict=True) if row["pareto"])
    kl.plot(*zip(*front, strict=True), color="gray", linestyle="--", linewidth=1, zorder=0, label="Pareto front")
    kl.set_ylabel("KL to full precision, nats a token")
    average, worst = ([max(row["attention"][which]["relative_l1"], MIN_KL) for row in rows] for which in WHICH)
    _points(attention, rows, bits, average)
    attention.vlines(bits, average, worst, color="gray", linewidth=1, zorder=0, label="up to the worst layer")
    attention.set_ylabel("attention output, relative L1 error")
    for axes in (kl, attention):
        axes.set(xlabel=f"bits a value at {rows[0]['at_tokens']} tokens, everything counted", yscale="log")
        if max(bits) > LOG_RATIO * min(bits):  # a narrower range may contain no power of two to label
            axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    legends = [axes.get_legend_handles_labels() for axes in (kl, attention)]
    lines = {label: line for legend in legends for line, label in zip(*legend, strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize="small")
    figure.savefig(target, dpi=150)


def _points(axes: Any, rows: list[Row], x: list[float], y: list[float]) -> None:
    """Plot each method with a distinct colour and marker, so it can be told apart without colours."""
    for i, row in enumerate(rows):
        axes.scatter(x[i], y[i], label=row["method"], color=f"C{i % 10}", marker=MARKERS[i % len(MARKERS)])


def draw_sensitivity(trials: list[Row], chosen: list[str], target: Path, title: str) -> None:
    """Plot the KL of each candidate in each layer alone, and the KL that one 2-bit head adds. Chosen ones are framed.

    Args:
        trials: `Tuned.trials`.
        chosen: name of the candidate chosen for each layer.
        target: image file to write, such as a .png.
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
    for axes in by_head:
        _heat(figure, axes, more, heads, len(chosen), "KL that 2 bits in one head add")
        axes.set_xticks(range(len(heads)), [f"{short[n]} {s}{h}" for n, s, h in heads], rotation=90, fontsize="x-small")
        axes.set_xlabel("\n".join(f"{letter}: {name}" for name, letter in short.items()), fontsize="x-small")
    figure.savefig(target, dpi=150)


def _heat(figure: Any, axes: Any, values: dict[Any, float], columns: list[Any], layers: int, title: str) -> None:
    """Draw a heat map, layers downwards, columns across. Combinations that were not tried stay white."""
    from matplotlib.colors import LogNorm

    grid = [[max(values.get((layer, column), math.nan), MIN_KL) for column in columns] for layer in range(layers)]
    figure.colorbar(axes.imshow(grid, aspect="auto", norm=LogNorm(), cmap="viridis"), ax=axes)
    axes.set(title=title, ylabel="layer")
    axes.set_yticks(range(layers))


def _frame(column: int, row: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2)
