"""Plots of `inspection.Inspected` layers. Only this module of the inspection imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qattn_hf.fidelity.inspection import Inspected

SIDES = ("key", "value")
MAX_HEADS = 8  # in a row of plots, one plot for each head
DARK = {"boxstyle": "round", "facecolor": "black", "alpha": 0.5, "linewidth": 0}  # around text, readable on any colour
LABEL = 0.3  # inches reserved for one label: number of a layer, of a head, or its bits
LEAST_MASS = 1e-6  # lower end of the logarithmic axis


def draw_all(layers: list[Inspected], folder: Path, shown: Sequence[int], title: str) -> list[Path]:
    """Write every plot to `folder`, which is created if needed.

    Args:
        layers: as `inspect` returns them.
        shown: indices of the model's layers that get separate plots (channels, sinks).
        title: title of every plot.

    Returns:
        The files: `channels-LAYER.png`, `gaps.png`, `sinks-LAYER.png`, `heads.png`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [layer for layer in layers if layer.layer in shown]
    figures = {f"channels-{x.layer}": channel_ranges(x, f"{title}, layer {x.layer}") for x in chosen}
    figures |= {f"sinks-{x.layer}": sink_map(x, f"{title}, layer {x.layer}") for x in chosen}
    figures |= {"gaps": value_gaps(layers, title), "heads": heads(layers, title)}
    files = []
    for name, figure in figures.items():
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=120)
    return files


def channel_ranges(layer: Inspected, title: str) -> Any:
    """Plot minimum and maximum of each channel over all tokens, for each head (TurboAttention, Fig. 4).

    Queries, keys and values have separate rows of at most `MAX_HEADS` heads. Plots of one kind share their axis.

    Returns:
        A matplotlib figure.
    """
    rows = [(name, first) for name, (low, _) in layer.ranges.items() for first in range(0, len(low), MAX_HEADS)]
    figure, plots = _subplots(len(rows), min(MAX_HEADS, max(len(low) for low, _ in layer.ranges.values())), title)
    for row, (name, first) in zip(plots, rows, strict=True):
        low, high = layer.ranges[name]
        for head, axes in enumerate(row, first):
            if head >= len(low):
                axes.axis("off")
                continue
            axes.fill_between(range(low.shape[1]), low[head].numpy(), high[head].numpy(), step="mid", linewidth=0)
            axes.set(ylim=(low.min().item(), high.max().item()), xlabel="channel")
            axes.set_title(f"{name}, head {head}", fontsize="small")
        row[0].set_ylabel(f"{name}: minimum to maximum")
    return figure


def value_gaps(layers: list[Inspected], title: str) -> Any:
    """Plot the spread (maximum minus minimum) of keys and of values by layer (TurboAttention, Figs 8 and 9).

    The left plots show spreads over the tokens of each channel, the right plots over the channels of each token.

    Returns:
        A matplotlib figure.
    """
    figure, plots = _subplots(2, 2, title, across=len(layers))
    for row, side in zip(plots, SIDES, strict=True):
        for axes, (what, gaps) in zip(row, (("channel", "channel_gaps"), ("token", "token_gaps")), strict=True):
            spreads = [getattr(layer, gaps)[side].flatten() for layer in layers]
            axes.boxplot([x.numpy() for x in spreads], showfliers=True, flierprops={"markersize": 2})
            axes.set_xticks(range(1, len(layers) + 1), [str(layer.layer) for layer in layers])
            axes.set(title=f"{side}s, gap of a {what}", xlabel="layer")
    return figure


def sink_map(layer: Inspected, title: str) -> Any:
    """Plot the attention mass of each token over its position and over the norm of its key, for each KV head.

    Only the first `MAX_HEADS` heads are shown. Tokens that the sink pool keeps unquantized are marked.

    Returns:
        A matplotlib figure.
    """
    heads = min(MAX_HEADS, len(layer.mass))
    figure, plots = _subplots(2, heads, title, sharey="row")
    for head in range(heads):
        held, mass = layer.held[head], layer.mass[head].clamp(min=LEAST_MASS).numpy()
        above, below = plots[0][head], plots[1][head]
        above.plot(mass, linewidth=0.7)
        above.scatter(held, mass[held], color="C3", marker="o", label="held out of the codes")
        above.set(title=f"KV head {head}", yscale="log", xlabel="token")
        below.scatter(layer.key_norms[head].numpy(), mass, s=4)
        below.scatter(layer.key_norms[head].numpy()[held], mass[held], color="C3", marker="o")
        below.set(yscale="log", xlabel="norm of the key")
    plots[0][0].set_ylabel("attention mass")
    plots[1][0].set_ylabel("attention mass")
    if any(layer.held):
        plots[0][-1].legend(fontsize="small")
    return figure


def heads(layers: list[Inspected], title: str) -> Any:
    """Plot TurboAttention's priority of each head as a colour, and the recipe's bits of that head as a number.

    Returns:
        A matplotlib figure.
    """
    across = max(len(layer.bits[side]) for layer in layers for side in SIDES)
    figure, plots = _subplots(1, 2, title, across=across, down=len(layers))
    for axes, side in zip(plots[0], SIDES, strict=True):
        priorities = torch.stack([layer.priorities[side] for layer in layers])
        shown = axes.imshow(priorities.clamp(min=1e-12).log10().numpy(), aspect="auto", cmap="viridis")
        for i, layer in enumerate(layers):
            for head, bits in enumerate(layer.bits[side]):
                label = axes.text(head, i, str(bits), ha="center", va="center", color="white", bbox=DARK)
                label.set_in_layout(False)  # inside the plot: laying out hundreds of labels takes many seconds
        axes.set(title=f"{side}s: bits, and log10 of the priority", xlabel="KV head", ylabel="layer")
        axes.set_xticks(range(priorities.shape[1]))
        axes.set_yticks(range(len(layers)), [str(layer.layer) for layer in layers])
        figure.colorbar(shown, ax=axes)
    return figure


def _subplots(
    rows: int, columns: int, title: str, sharey: Any = False, across: int = 0, down: int = 0
) -> tuple[Any, Any]:
    """Make a figure and its plots, each with room for `across` labels in width and `down` labels in height."""
    from matplotlib.figure import Figure

    width, height = max(3.2, LABEL * across + 1.4), max(2.6, LABEL * down + 0.8)  # constants: axes and titles
    figure = Figure(figsize=(max(6.0, width * columns), height * rows + 0.6), layout="constrained")
    figure.suptitle(title, fontsize="medium", wrap=True)
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey)
