"""Table of `qattn tune`: tune- of `eval/results/`."""

from __future__ import annotations

from pathlib import Path

from recorded import load, markdown


def tune_table(results: Path) -> str:
    """Tuned recipes on the rows that decided and on others, beside the references there."""
    rows = []
    for result in load(results, "tune-"):
        for row in result["rows"]:
            error = "" if row["kl_se"] is None else f" ({row['kl_se']:.6f})"
            bits = [f"{row[key]:.3f}" for key in ("effective_bits", "effective_bits_total")]
            predicted = f"{row['predicted_kl']:.6f}" if "predicted_kl" in row else ""
            rows.append([row["model"], row["method"], row["on"], predicted, f"{row['kl']:.6f}{error}", *bits])
    header = ["model", "recipe", "on", "predicted KL", "KL", "bits, closed", "bits, all"]
    return markdown(header, rows) if rows else "Not measured yet."
