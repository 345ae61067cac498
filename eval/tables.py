"""Regenerate the generated parts of README and docs: `python eval/tables.py`, or `--check` to only compare.

A generated part is between `<!-- table:NAME -->` and `<!-- /table -->`, with `# ` before them in a YAML file. NAME is a
key of `TABLES`. The pages `docs/methods/NAME.md` are generated as a whole, one for each method.
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

import code_tables
import gpu_tables
import overview_table
import paper_tables
import quality_tables
import several_gpu_tables
import small_gpu_tables
import speed_tables
import task_tables
import training_tables
import type_tables
from api_page import api_table, cli_table
from known_types import known_table
from method_pages import common_table, index_table, method_page, nav
from recorded import conditions

from qattn_hf.methods import list_methods

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
# The records that a page of results is made of.
PAGES = {
    "overview": ("released-*", "front-*"),
    "quality": ("released-*", "recipes*", "quality-*", "budget-*", "tune"),
    "pruning": ("pruning-*", "pruned-keys-*"),
    "other-kernels": ("speed-peers",),
    "tasks": ("tasks-*",),
    "task-scores": ("task-scores-*", "fine-tune-*"),
    "papers": ("paper-*", "table-*"),
    "speed": ("speed-*", "long-prompts", "cpu-speed"),
    "size": ("bits*", "plan-check"),
    "gpus": ("gpus",),
    "small-gpus": ("small-gpus",),
    "several-gpus": ("several-gpus", "move-prefix"),
    "training": ("grpo-*",),
}


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
    text = conditions(results, *PAGES[page], notes=page == "overview")
    # lines of the front page are short
    return text.replace("; ", ";\n").replace(". Commands", ".\nCommands") if page == "overview" else text


DECLARED = (
    overview_table, quality_tables, speed_tables, small_gpu_tables, several_gpu_tables, task_tables, paper_tables,
    type_tables, gpu_tables, training_tables,
)  # fmt: skip
TABLES: dict[str, Callable[[Path], str]] = {
    **{table.name: table for module in DECLARED for table in module.TABLES},
    **{f"conditions-{page}": partial(_conditions, page=page) for page in PAGES},
    "methods": code_tables.methods_table,
    "method-pages": index_table,
    "nav-methods": nav,
    "common-settings": common_table,
    "families": code_tables.families_table,
    "kernels": code_tables.kernels_table,
    "known-types": known_table,
    "own-tests": type_tables.own_tests_table,
    "tasks": task_tables.tasks_table,
    "report": report_example,
    "api": api_table,
    "cli": cli_table,
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
