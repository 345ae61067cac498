"""Pictures of `inspection.Inspected` layers; matplotlib is loaded only here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qattn_hf.fidelity.inspection import Inspected

SIDES = ("key", "value")
MOST = 8  # heads of a picture that has a panel for each
DARK = {"boxstyle": "round", "facecolor": "black", "alpha": 0.5, "linewidth": 0}  # behind text on any colour
LEAST_MASS = 1e-6  # of a logarithmic axis


def draw_all(layers: list[Inspected], folder: Path, shown: Sequence[int], title: str) -> list[Path]:
    """Write every picture to `folder`, which is made if it is not there.

    Args:
        shown: layers of the pictures that show some layers only.

    Returns:
        the files: `channels-LAYER.png`, `gaps.png`, `sinks-LAYER.png`, `heads.png`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = {f"channels-{i}": channel_ranges(layers[i], f"{title}, layer {i}") for i in shown}
    figures |= {f"sinks-{i}": sink_map(layers[i], f"{title}, layer {i}") for i in shown}
    figures |= {"gaps": value_gaps(layers, title), "heads": heads(layers, title)}
    files = []
    for name, figure in figures.items():
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=120)
    return files


def channel_ranges(layer: Inspected, title: str) -> Any:
    """Smallest and largest number of each channel over all tokens, head by head (TurboAttention, Fig. 4).

    Queries, keys and values one below another, `MOST` heads a row at most; those of one kind share their axis.
    """
    rows = [(name, first) for name, (low, _) in layer.ranges.items() for first in range(0, len(low), MOST)]
    figure, panels = _panels(len(rows), min(MOST, max(len(low) for low, _ in layer.ranges.values())), title)
    for row, (name, first) in zip(panels, rows, strict=True):
        low, high = layer.ranges[name]
        for head, panel in enumerate(row, first):
            if head >= len(low):
                panel.axis("off")
                continue
            panel.fill_between(range(low.shape[1]), low[head].numpy(), high[head].numpy(), step="mid", linewidth=0)
            panel.set(ylim=(low.min().item(), high.max().item()), xlabel="channel")
            panel.set_title(f"{name}, head {head}", fontsize="small")
        row[0].set_ylabel(f"{name}: smallest to largest")
    return figure


def value_gaps(layers: list[Inspected], title: str) -> Any:
    """Distribution of largest less smallest value, of channels over tokens and of tokens over channels, by layer
    (TurboAttention, Figs 8 and 9), and the same of keys."""
    figure, panels = _panels(2, 2, title)
    for row, side in zip(panels, SIDES, strict=True):
        for panel, (what, gaps) in zip(row, (("channel", "channel_gaps"), ("token", "token_gaps")), strict=True):
            found = [getattr(layer, gaps)[side].flatten() for layer in layers]
            panel.boxplot([x.numpy() for x in found], showfliers=True, flierprops={"markersize": 2})
            panel.set_xticks(range(1, len(layers) + 1), [str(i) for i in range(len(layers))])
            panel.set(title=f"{side}s, gap of a {what}", xlabel="layer")
    return figure


def sink_map(layer: Inspected, title: str) -> Any:
    """Attention mass of each token and the norm of its key, of the first `MOST` KV heads; the pool's are marked."""
    heads = min(MOST, len(layer.mass))
    figure, panels = _panels(2, heads, title, sharey="row")
    for head in range(heads):
        held, mass = layer.held[head], layer.mass[head].clamp(min=LEAST_MASS).numpy()
        above, below = panels[0][head], panels[1][head]
        above.plot(mass, linewidth=0.7)
        above.scatter(held, mass[held], color="C3", marker="o", label="held out of the codes")
        above.set(title=f"KV head {head}", yscale="log", xlabel="token")
        below.scatter(layer.key_norms[head].numpy(), mass, s=4)
        below.scatter(layer.key_norms[head].numpy()[held], mass[held], color="C3", marker="o")
        below.set(yscale="log", xlabel="norm of the key")
    panels[0][0].set_ylabel("attention mass")
    panels[1][0].set_ylabel("attention mass")
    if any(layer.held):
        panels[0][-1].legend(fontsize="small")
    return figure


def heads(layers: list[Inspected], title: str) -> Any:
    """TurboAttention's priority of each head as a colour, and the bits that the recipe gave it as a number."""
    figure, panels = _panels(1, 2, title)
    for panel, side in zip(panels[0], SIDES, strict=True):
        priorities = torch.stack([layer.priorities[side] for layer in layers])
        shown = panel.imshow(priorities.clamp(min=1e-12).log10().numpy(), aspect="auto", cmap="viridis")
        for i, layer in enumerate(layers):
            for head, bits in enumerate(layer.bits[side]):
                panel.text(head, i, str(bits), ha="center", va="center", color="white", bbox=DARK)
        panel.set(title=f"{side}s: bits, and log10 of the priority", xlabel="KV head", ylabel="layer")
        panel.set_xticks(range(priorities.shape[1]))
        panel.set_yticks(range(len(layers)))
        figure.colorbar(shown, ax=panel)
    return figure


def _panels(rows: int, columns: int, title: str, sharey: Any = False) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 3.2 * columns), 2.6 * rows + 0.6), layout="constrained")
    figure.suptitle(title, fontsize="medium", wrap=True)
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey)
