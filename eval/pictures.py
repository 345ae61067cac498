"""Draw the pictures of the documentation from recorded rows: `python eval/pictures.py`.

Each PNG file carries a digest of the rows that it shows, so that a test sees when it is stale.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from overview_table import FRONT
from quality_tables import CHECKPOINTS, checkpoints
from recorded import load

from qattn_hf.bench.picture import draw

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
DECODE = ROOT / "docs" / "results" / "decode.png"
LOSS = ROOT / "docs" / "results" / "quality.png"
SHOWN = ("turbo:sink_num=0", "int8", "sinkq", "kivi:bits=2,group_size=128,residual_length=32")
BATCHES = (1, 16)
LINE = 0.11  # height of a label in decades of KL


def decode_rows(results: Path) -> tuple[list[dict[str, Any]], str]:
    """Rows of the decode bench that are drawn, and on what they were recorded."""
    (result,) = load(results, "speed-decode")
    rows = [row for row in result["rows"] if row["batch"] in BATCHES and (not row["packed"] or row["way"] in SHOWN)]
    return rows, f"{result['device']}, torch {result['versions']['torch']}"


def loss_rows(results: Path) -> list[dict[str, Any]]:
    """KL and bits of the recommended settings on each released checkpoint."""
    keys = ("setting", "kl", "bits")
    known = checkpoints([result for pattern in CHECKPOINTS.split() for result in load(results, pattern)])
    return [
        {"model": name, **{key: rows[setting][key] for key in keys}}
        for name, rows in known.items()
        for setting in FRONT
        if setting in rows
    ]


def draw_loss(rows: list[dict[str, Any]], target: Path) -> None:
    """KL against bits, a plot for each checkpoint; rounding alone (`none`) is the dashed line."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(models), sharey=True, squeeze=False)[0], models, strict=True):
        axes.set(title=model, xlabel="bits per stored value, closed blocks", yscale="log", xlim=(2, 10.5))
        points = sorted((row["kl"], row["bits"], row["setting"]) for row in rows if row["model"] == model)
        labels: list[tuple[float, float]] = []  # bits and height of each, the height in decades of KL
        for kl, bits, setting in points:
            if setting == "none":
                axes.axhline(kl, color="gray", linestyle="--", label="rounding alone")
                continue
            height = max([math.log10(kl), *(other + LINE for at, other in labels if abs(at - bits) < 1)])
            labels.append((bits, height))
            axes.plot(bits, kl, "o", color="tab:blue")
            axes.annotate(setting, (bits, kl), (bits + 0.2, 10**height), fontsize=9, va="center")
        axes.legend(fontsize=9)
    figure.axes[0].set_ylabel("KL to full precision, nats per token")
    figure.savefig(target, dpi=130, metadata={"Source": digest(rows)})


def digest(rows: list[dict[str, Any]]) -> str:
    """SHA-256 of rows."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def main() -> None:
    rows, where = decode_rows(RESULTS)
    draw(rows, DECODE, where, {"Source": digest(rows)})
    draw_loss(loss_rows(RESULTS), LOSS)


if __name__ == "__main__":
    main()
