"""Plots of benchmark rows. matplotlib is imported when a plot is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qattn_hf.bench.tables import Row, best_stock, by_point, ways
from qattn_hf.errors import QAttnError
from qattn_hf.messages.origin import device_name, versions

BEST = "best SDPA"
TITLES = {
    "decode": "One layer's decode step for one new token",
    "prefill": "One layer's causal prefill",
    "generate": "A whole model's generate",
}


def need_matplotlib(option: str = "--picture") -> None:
    """Check that matplotlib is installed, before the work that `option` would plot.

    Raises:
        QAttnError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise QAttnError(f"{option} needs matplotlib: pip install matplotlib, or qattn-hf[plot]") from None


def draw(rows: list[Row], target: Path, measured_on: str | None = None, metadata: dict[str, str] | None = None) -> None:
    """Plot the rows of one bench.

    Args:
        rows: rows from `decode.rows`, `prefill.rows` or `generate.rows`.
        target: image file to write, such as a .png.
        measured_on: device and versions for the title. None: this machine's device and torch version.
        metadata: kept in the image file.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    drawers = {"decode": _decode, "prefill": _prefill, "generate": _generate}
    drawers[rows[0]["bench"]](figure, [row for row in rows if "error" not in row and row.get("room", 1) == 1])
    measured_on = measured_on or f"{device_name()}, torch {versions()['torch']}"
    figure.suptitle(f"{TITLES[rows[0]['bench']]}, {measured_on}", fontsize="medium")
    figure.savefig(target, dpi=130, metadata=metadata)


def _decode(figure: Any, rows: list[Row]) -> None:
    """Plot milliseconds over context, in one plot for each batch size."""
    batches = by_point(rows, "batch")
    plots = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for axes, ((batch,), batch_rows) in zip(plots, sorted(batches.items()), strict=True):
        best = [row for point in by_point(batch_rows, "context").values() if (row := best_stock(point))]
        lines = {BEST: best} | {
            name: [r for r in batch_rows if r["way"] == name] for name in ways(batch_rows, packed=True)
        }
        for name, line in lines.items():
            line = sorted(line, key=lambda row: row["context"])
            style = {"color": "black", "linestyle": "--"} if name == BEST else {}
            axes.plot([r["context"] for r in line], [r["ms"] for r in line], marker="o", label=name, **style)
        axes.set(title=f"batch {batch}", xlabel="cached tokens", xscale="log", yscale="log")
        contexts = sorted({row["context"] for row in batch_rows})
        axes.set_xticks(contexts, [f"{n / 1024:g}k" for n in contexts], minor=False)
        axes.set_xticks([], minor=True)
    plots[0].yaxis.set_major_formatter("{x:g}")
    plots[0].set_ylabel("ms, one layer's decode step")
    figure.legend(*plots[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def _prefill(figure: Any, rows: list[Row]) -> None:
    """Plot TOPS, in a group of bars for each point."""
    points = by_point(rows, "batch", "tokens")
    labels = [f"{batch} x {tokens}" for batch, tokens in points]
    names = [*ways(rows, packed=False), *ways(rows, packed=True)]
    _bars(figure, labels, names, list(points.values()), "tops", "TOPS, one layer's causal prefill")


def _generate(figure: Any, rows: list[Row]) -> None:
    """Plot milliseconds per token, in a group of bars for each point. Rows without a `generate` are left out."""
    rows = [row for row in rows if "ms_per_token" in row]
    points = by_point(rows, "batch", "context")
    labels = [f"batch {batch}, {context} tokens" for batch, context in points]
    names = list(dict.fromkeys(row["way"] for row in rows))
    _bars(figure, labels, names, list(points.values()), "ms_per_token", "ms a token in generate")


def _bars(figure: Any, labels: list[str], names: list[str], groups: list[list[Row]], key: str, title: str) -> None:
    axes = figure.subplots()
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        heights = [next((row[key] for row in group if row["way"] == name), 0) for group in groups]
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(groups))]
        axes.bar(places, heights, width, label=name)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel(title)
    axes.legend(fontsize="small")
