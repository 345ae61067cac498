"""Regenerate the README's tables from `eval/results/*.json`: `python eval/tables.py`, or `--check` to only compare.

A table stands between `<!-- table:NAME -->` and `<!-- /table -->`; NAME is a key of `TABLES`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from family_tables import families_table
from fidelity_tables import compare_table, tune_table
from method_tables import kernels_table, methods_table
from overview_table import overview_table
from paper_tables import contradicted_table, int_flash_table, papers_table, sage2_table
from recorded import Result, load, markdown, origin, settings
from task_tables import scores_table, tasks_table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
README = ROOT / "README.md"

# How many times smaller a cache gets by a paper: where it says so, the figure, its setting, ours as `label` names it,
# and why the two differ. All of head dim 128, as most of the papers' models have.
CLAIMS = [
    (
        "TurboAttention, abstract", "over 4.4x", "none named; its main results are of 4 bits", "`turbo`",
        "4.4x is 3.64 bits, less than 4-bit codes alone",
    ),
    (
        "TurboAttention, abstract", "over 4.4x", "none named; or its mixed, half of the heads in 2 bits",
        "`turbo` (bits mixed)", "holds once the INT8 buffer weighs little",
    ),
    (
        "SinkQ, abstract and 4.3", "6.4x", "2 bits, G 128, long contexts", "`sinkq`",
        "codes, steps and minima are 7.1x; theirs is the slope of peak memory, ours counts open tokens and pool",
    ),
    (
        "SinkQ, 4.3", "about 5.0x", "2 bits, G 32, long contexts", "`sinkq` (group_size 32)",
        "the same, of 5.3x",
    ),
    (
        "SinkQ, 4.3, names no method", "about 5.0x", "2 bits, G 32, long contexts", "`kivi` (bits 2)",
        "the same, with 128 newest tokens open instead of 32 and no pool",
    ),
    (
        "Sparse V, 2.1", "4.6x", "turbo3, 14 bytes for 32 values", "`turboquant` (k_format turbo3, v_format turbo3)",
        "holds once the 128 newest tokens weigh little",
    ),
]  # fmt: skip


def label(row: dict[str, Any]) -> str:
    """`turbo`, or `turbo (k_bits 4, v_bits 2)`."""
    if row["method"] == "fp":
        return "full precision"
    given = ", ".join(f"{key} {value}" for key, value in settings(row).items())
    return f"`{row['method']}`" + (f" ({given})" if given else "")


def recipes_table(results: Path) -> str:
    """Mixed recipes beside what they were mixed from: KL, its paired difference, and all bits a value."""
    parts = []
    for result in load(results, "recipes"):
        header = ["model", "recipe", "beside", "KL", "its KL", "difference", "bits, all", "its bits"]
        rows = [
            [
                row["model"],
                f"`{row['recipe']}`",
                f"`{row['parent']}`",
                *(f"{row[name]:.6f}" for name in ("kl", "parent_kl")),
                f"{row['change']:+.6f} ({row['se']:.6f})",
                *(f"{row[name]:.3f}" for name in ("bits", "parent_bits")),
            ]
            for row in result["rows"]
        ]
        parts.append(f"{markdown(header, rows)}\n\nHow: {origin(result)}")
    return "\n\n".join(parts) or "Not measured yet."


def quality_table(results: Path) -> str:
    """Damage by the cache: KL to full precision and what follows from it, per model and method."""

    def figure(row: dict[str, Any], key: str, form: str) -> str:
        return format(row[key], form) if key in row else ""

    groups: dict[tuple[bool, str], list[Result]] = {}
    for result in load(results, "quality-"):
        groups.setdefault((result["name"].startswith("quality-full-"), result["rows"][0]["model"]), []).append(result)
    parts = []
    for (_, model), recorded in groups.items():
        found = [row for result in recorded for row in result["rows"]]
        scores = [name for name in ("sums", "recall") if any(name in row for row in found)]
        header = ["cache", "KL", "same top-1", "perplexity", "change", *scores, "bits, closed blocks", "bits, all"]
        rows = [
            [
                label(row),
                figure(row, "kl", ".6f"),
                figure(row, "same_top1", ".4f"),
                figure(row, "ppl", ".3f"),
                f"{row['ppl_change_pct']:+.2f} % ({row['se_pct']:.2f})" if "ppl_change_pct" in row else "",
                *(figure(row, name, ".3f") for name in scores),
                figure(row, "effective_bits", ".3f"),
                figure(row, "effective_bits_total", ".3f"),
            ]
            for row in found
        ]
        parts.append(f"**{model}**\n\n{markdown(header, rows)}\n\nHow: {' '.join(map(origin, recorded))}")
    return "\n\n".join(parts) or "Not measured yet."


def bits_table(results: Path) -> str:
    """Bits of one cached value: in closed blocks, and of the whole cache (open tokens and spare room counted)."""
    parts = []
    for result in load(results, "bits"):
        lengths = sorted({row["tokens"] for row in result["rows"]})
        groups: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
        for row in result["rows"]:
            groups.setdefault((label(row), row["head_dim"]), {})[row["tokens"]] = row
        header = ["cache", "head dim", "closed blocks", *(f"all, {length} tokens" for length in lengths)]
        rows = [
            [
                name,
                str(head_dim),
                f"{by_length[max(by_length)]['effective_bits']:.3f}",
                *(f"{by_length[n]['effective_bits_total']:.3f}" if n in by_length else "" for n in lengths),
            ]
            for (name, head_dim), by_length in groups.items()
        ]
        parts.append(f"{markdown(header, rows)}\n\nHow: {origin(result)}")
    return "\n\n".join(parts) or "Not measured yet."


def claimed_table(results: Path) -> str:
    """How many times smaller than with 16 bits a value: what papers claim, and ours by what the tensors hold."""
    parts = []
    for result in load(results, "bits"):
        found = {(label(row), row["tokens"]): row for row in result["rows"] if row["head_dim"] == 128}
        lengths = sorted({tokens for _, tokens in found if tokens >= 4096})  # the claims are of long contexts
        header = ["paper", "claimed", "of", "ours", "closed blocks", *(f"all, {n} tokens" for n in lengths)]
        rows = [
            [
                *claim,
                f"{16 / found[claim[3], lengths[-1]]['effective_bits']:.2f}x",
                *(f"{16 / found[claim[3], n]['effective_bits_total']:.2f}x" for n in lengths),
                why,
            ]
            for *claim, why in CLAIMS
            if lengths and (claim[3], lengths[-1]) in found
        ]
        parts.append(f"{markdown([*header, 'why they differ'], rows)}\n\nHow: {origin(result)}")
    return "\n\n".join(parts) or "Not measured yet."


def speed_table(results: Path, bench: str) -> str:
    """Rows of `qattn bench`, as the command shows them."""
    from qattn_hf.bench.tables import computed_by, table

    def shown(result: Result) -> str:
        return f"{markdown(*table(result['rows']))}\n\n{computed_by(result['rows'])} How: {origin(result)}"

    return "\n\n".join(map(shown, load(results, f"speed-{bench}"))) or "Not measured yet."


def report_example(results: Path) -> str:
    """What `qattn report` prints for the embedded model; nothing recorded is needed."""
    from qattn_hf.cli import main as qattn

    printed = io.StringIO()
    reference = mock.patch.dict(os.environ, {"TRITON_INTERPRET": "0"})  # tests set it, and it would take minutes
    try:
        with contextlib.redirect_stdout(printed), reference:
            qattn(["report", "--tokens", "1000", "--device", "cpu"])
    except SystemExit as ended:
        if ended.code:
            raise
    return f"```text\n{printed.getvalue().rstrip()}\n```"


TABLES: dict[str, Callable[[Path], str]] = {
    "overview": overview_table,
    "methods": methods_table,
    "families": families_table,
    "report": report_example,
    "kernels": kernels_table,
    "quality": quality_table,
    "recipes": recipes_table,
    "bits": bits_table,
    "claimed": claimed_table,
    "int-flash": int_flash_table,
    "sage2": sage2_table,
    "papers": papers_table,
    "contradicted": contradicted_table,
    "tasks": tasks_table,
    "scores": scores_table,
    "compare": compare_table,
    "tune": tune_table,
    "decode": partial(speed_table, bench="decode"),
    "prefill": partial(speed_table, bench="prefill"),
    "generate": partial(speed_table, bench="generate"),
}


def fill(text: str, results: Path) -> str:
    """`text` with every marked table made anew.

    Raises:
        KeyError: a marker names a table that nobody makes.
    """

    def table(match: re.Match[str]) -> str:
        return f"{match['begin']}\n{TABLES[match['name']](results)}\n{match['end']}"

    pattern = r"(?P<begin><!-- table:(?P<name>[\w-]+) -->)\n.*?(?P<end><!-- /table -->)"
    return re.sub(pattern, table, text, flags=re.DOTALL)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Regenerate the tables of the README from eval/results/*.json.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is stale")
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    old = options.readme.read_text(encoding="utf-8")
    new = fill(old, options.results)
    if options.check and new != old:
        sys.exit(f"{options.readme.name} is stale: run `python eval/tables.py`")
    if not options.check:
        options.readme.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
