"""Make the generated parts of README and docs anew: `python eval/tables.py`, or `--check` to only compare.

A generated part stands between `<!-- table:NAME -->` and `<!-- /table -->`, in a YAML file behind `# `; NAME is a key
of `TABLES`. `docs/methods/NAME.md` are made as a whole, one for each method found.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

from api_page import api_table
from budget_tables import latent_table, outgrown_table
from family_tables import families_table
from fidelity_tables import tune_table
from gpu_run_tables import gpu_runs_table
from known_types import known_table
from method_pages import common_table, index_table, method_page, nav
from method_tables import kernels_table, methods_table
from overview_table import (
    fastest_table,
    generate_overview,
    least_table,
    overview_table,
    settings_table,
    throughput_overview,
)
from paper_tables import contradicted_table, int_flash_table, papers_table, sage2_table
from quality_tables import bits_table, claimed_table, recipes_table
from recorded import Result, conditions, load, markdown
from released_tables import choices_table, parts_table, released_table, trained_table
from speed_tables import (
    append_table,
    beams_table,
    before_after_table,
    compensation_speed_table,
    eager_table,
    heads_table,
    long_prompts_table,
    plan_table,
    recipes_speed_table,
    slopes_table,
    sparse_v_table,
    stop_check_table,
    warps_table,
    windows_table,
)
from task_score_tables import chosen_tasks_table, fine_tunes_table, task_scores_table, tool_calls_table
from task_tables import scores_table, tasks_table
from transformers_tables import own_tests_table
from type_tables import types_table, weights_table

from qattn_hf.methods import list_methods

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
# The records that a page of results is made of, by the start of their names.
PAGES = {
    "overview": ("released-", "front-"),
    "quality": ("released-", "recipes", "quality-", "budget-", "tune-"),
    "tasks": ("tasks-",),
    "task-scores": ("task-scores-", "fine-tune-"),
    "papers": ("paper-", "table-"),
    "speed": ("speed-",),
    "size": ("bits",),
}


def speed_table(results: Path, bench: str) -> str:
    """Rows of `qattn bench`, as the command shows them."""
    from qattn_hf.bench.tables import computed_by, table

    def shown(result: Result) -> str:
        return f"{markdown(*table(result['rows']))}\n\n{computed_by(result['rows'])}"

    return "\n\n".join(map(shown, load(results, f"speed-{bench}"))) or "Not measured yet."


def report_example(results: Path) -> str:
    """What `qattn cache report` prints for the embedded model; nothing recorded is needed."""
    from qattn_hf.cli import main as qattn

    printed = io.StringIO()
    reference = mock.patch.dict(os.environ, {"TRITON_INTERPRET": "0"})  # tests set it, and it would take minutes
    try:
        with contextlib.redirect_stdout(printed), reference:
            qattn(["cache", "report", "--tokens", "1000", "--device", "cpu"])
    except SystemExit as ended:
        if ended.code:
            raise
    return f"```text\n{printed.getvalue().rstrip()}\n```"


def _conditions(results: Path, page: str) -> str:
    text = conditions(results, *PAGES[page])
    # lines of the front page are short
    return text.replace("; ", ";\n").replace(". Commands", ".\nCommands") if page == "overview" else text


TABLES: dict[str, Callable[[Path], str]] = {
    "overview": overview_table,
    "overview-generate": generate_overview,
    "overview-throughput": throughput_overview,
    "settings": settings_table,
    "fastest": fastest_table,
    "least": least_table,
    "methods": methods_table,
    "method-pages": index_table,
    "nav-methods": nav,
    "common-settings": common_table,
    "families": families_table,
    "types": types_table,
    "quantized-weights": weights_table,
    "known-types": known_table,
    "own-tests": own_tests_table,
    "report": report_example,
    "gpu-runs": gpu_runs_table,
    "kernels": kernels_table,
    "released": released_table,
    "parts": parts_table,
    "trained": trained_table,
    "choices": choices_table,
    "recipes": recipes_table,
    "outgrown": outgrown_table,
    "latent": latent_table,
    "bits": bits_table,
    "claimed": claimed_table,
    "int-flash": int_flash_table,
    "sage2": sage2_table,
    "papers": papers_table,
    "contradicted": contradicted_table,
    "tasks": tasks_table,
    "scores": scores_table,
    "task-scores": task_scores_table,
    "tool-calls": tool_calls_table,
    "chosen-tasks": chosen_tasks_table,
    "fine-tunes": fine_tunes_table,
    "tune": tune_table,
    "decode": partial(speed_table, bench="decode"),
    "decode-slopes": slopes_table,
    "bitdecoding": partial(speed_table, bench="bitdecoding"),
    "eager": eager_table,
    "decode-heads": heads_table,
    "decode-warps": warps_table,
    "rotations-speed": partial(before_after_table, record="speed-before-after-rotations"),
    "programs-speed": partial(before_after_table, record="speed-before-after-programs"),
    "registers-speed": partial(before_after_table, record="speed-before-after-append"),
    "prompts-speed": partial(before_after_table, record="speed-before-after-long"),
    "unpacked-speed": partial(before_after_table, record="speed-before-after-unpacked"),
    "tails-speed": partial(before_after_table, record="speed-before-after-tails"),
    "groups-speed": partial(before_after_table, record="speed-before-after-groups"),
    "tiles-speed": partial(before_after_table, record="speed-before-after-tiles"),
    "rows-speed": partial(before_after_table, record="speed-before-after-rows"),
    "short-speed": partial(before_after_table, record="speed-before-after-short"),
    "early-speed": partial(before_after_table, record="speed-before-after-early"),
    "stop-check": stop_check_table,
    "long-decode": partial(speed_table, bench="long-decode"),
    "recipes-speed": recipes_speed_table,
    "append-speed": append_table,
    "beams": beams_table,
    "crop-speed": partial(beams_table, record="speed-crop"),
    "compensation-speed": compensation_speed_table,
    "long-prompts": long_prompts_table,
    "sparse-v": sparse_v_table,
    "plan-check": plan_table,
    "windows": windows_table,
    "prefill": partial(speed_table, bench="prefill"),
    "generate": partial(speed_table, bench="generate"),
    "throughput": partial(speed_table, bench="throughput"),
    "requests": partial(speed_table, bench="requests"),
    "pieces": partial(speed_table, bench="pieces"),
    "sliding-gemma-3": partial(speed_table, bench="sliding-gemma-3"),
    "sliding-gpt-oss": partial(speed_table, bench="sliding-gpt-oss"),
    "compile": partial(speed_table, bench="compile"),
    "first-call": partial(speed_table, bench="first-call"),
    "api": api_table,
    **{f"conditions-{page}": partial(_conditions, page=page) for page in PAGES},
}


def fill(text: str, results: Path) -> str:
    """`text` with every marked table made anew.

    Raises:
        KeyError: a marker names a table that nobody makes.
        ValueError: a table has no end, so that what follows would go with it.
    """

    def table(match: re.Match[str]) -> str:
        if "<!-- table:" in match["old"]:
            raise ValueError(f"table:{match['name']} has no <!-- /table --> before the next table")
        return f"{match['begin']}\n{TABLES[match['name']](results)}\n{match['end']}"

    pattern = r"(?P<begin><!-- table:(?P<name>[\w-]+) -->)\n(?P<old>.*?)(?P<end>(?: *# )?<!-- /table -->)"
    return re.sub(pattern, table, text, flags=re.DOTALL)


def made(root: Path, results: Path) -> Iterator[tuple[Path, str]]:
    """Every file that has generated parts, with the text that it should have."""
    whole = {root / "docs" / "methods" / f"{name}.md": name for name in list_methods()}
    for path, name in whole.items():
        yield path, method_page(name, results)
    for path in (root / "README.md", root / "mkdocs.yml", *sorted((root / "docs").rglob("*.md"))):
        if path.is_file() and path not in whole:
            yield path, fill(path.read_text(encoding="utf-8"), results)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the generated parts of README and docs of eval/results/*.json.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a part is stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder of README.md and docs/")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    stale = [
        (path, text)
        for path, text in made(options.root, options.results)
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if options.check and stale:
        names = ", ".join(str(path.relative_to(options.root)) for path, _ in stale)
        sys.exit(f"stale: {names}; run `python eval/tables.py`")
    for path, text in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
