"""Tables of `qattn compare`, `qattn retrieval` and `qattn tune`: compare-, draft-acceptance, retrieval-, rollout- and
tune- of `eval/results/`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from recorded import Result, load, markdown

SIDES = ("model", "draft", "both")
READING = ("model", "rows", "tokens", "scored_from", "at_tokens")  # rows with these alike stand in one table


def compare_table(results: Path) -> str:
    """Methods beside full precision, end to end and layer by layer: the table that the command shows, of all records of
    the same reading of a model together. A setting that was recorded twice has the row of the first by name."""
    from qattn_hf.compare import table
    from qattn_hf.fidelity.metrics import pareto

    readings: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in (row for result in load(results, "compare-") for row in result["rows"]):
        readings.setdefault(tuple(row[key] for key in READING), {}).setdefault(row["method"], row)
    parts = []
    for (model, *_), found in readings.items():
        best = pareto([(row["effective_bits_total"], row["kl"]) for row in found.values()])
        header, lines = table([{**row, "pareto": i in best} for i, row in enumerate(found.values())])
        flat = [[cell.replace("\n", " ") for cell in line] for line in (header, *lines)]
        parts.append(f"**{model}**\n\n{markdown(flat[0], flat[1:])}")
    return "\n\n".join(parts) or "Not measured yet."


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


def drafts_table(results: Path) -> str:
    """Share of a draft's tokens that a model accepts, and tokens of each of its calls, by which of them is packed."""
    rows = [row for result in load(results, "draft-acceptance") for row in result["rows"]]
    lines = []
    for row in rows:
        shown = (f"{row['accepted'][s]:.3f}, {row['per_call'][s]:.2f}" if s in row["accepted"] else "" for s in SIDES)
        lines.append([f"`{row['method']}`" if "draft" in row["accepted"] else row["method"], *shown])
    return markdown(["cache", *(f"{side} packed" for side in SIDES)], lines) if lines else "Not measured yet."


def rollouts_table(results: Path) -> str:
    """What models wrote through each cache, judged by full precision."""
    lines = []
    for row in (row for result in load(results, "rollout-") for row in result["rows"]):
        parts = ", ".join(f"{kl:.4f}" for kl in row["kl_parts"])
        figures = [f"{row['kl']:.4f} ({row['kl_se']:.4f})", parts, f"{row['same_top1']:.3f}"]
        figures += [f"{row['first_divergence']:.0f}", f"{row['ppl']:.2f}", f"{row['effective_bits']:.2f}"]
        how = f"sampled, {row['temperature']:g}" if row["temperature"] else "greedy"
        lines.append([row["model"], how, f"`{row['method']}`", *figures])
    header = ["model", "tokens", "method", "KL (SE)", "KL of each quarter", "same first choice", "first divergence"]
    return markdown([*header, "perplexity", "bits, closed"], lines) if lines else "Not measured yet."


def retrievals_table(results: Path) -> str:
    """Values that full precision and each cache find in long texts, a table a model, and where they stood."""
    from qattn_hf.fidelity.retrieval import FULL, retrieval_table

    parts, models = [], dict[str, list[Result]]()
    for result in load(results, "retrieval-"):  # several records of a model have full precision each
        rows = models.setdefault(result["rows"][0]["model"], [])
        known = {row["method"] for row in rows}
        rows += [row for row in result["rows"] if row["method"] not in known]
    for rows in models.values():
        first = rows[0]
        header, lines = retrieval_table(rows)
        marked = [[name if name == FULL else f"`{name}`", *cells] for name, *cells in lines]
        about = (
            f"**{first['model']}**, {first['answers']} values a column, at depths of {', '.join(first['by_depth'])} %"
        )
        parts.append(f"{about}\n\n{markdown(header, marked)}")
    return "\n\n".join(parts) or "Not measured yet."
