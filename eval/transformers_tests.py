"""Run transformers' tests of generation and caches over patched models, and print one JSON row per test.

    python eval/transformers_tests.py CHECKOUT --method none --method turbo

CHECKOUT is a checkout of transformers' repository, best of the installed version: the wheel has no tests, and the sdist
lacks some. The tests are those of `GenerationTesterMixin` in the test files of six families. They use tiny random
models and download nothing. They run over stock models first, then over models patched with each method. Two more
packages are needed: `pip install parameterized httpx`.

Three things differ from transformers' run, for stock models as well: masks are padded on the left, attention weights
are not requested (`has_attentions`), and packed caches are compared tensor by tensor, because they have no keys and
values. A test counts for a method if it passes with stock models.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt_oss")
METHODS = ("none", "int8", "turbo", "kivi")
# Statements of tests that ask for what a packed cache is not meant to be, with the reason: no others may fail.
BY_DESIGN = {
    "self.assertTrue(isinstance(decoder_cache, DynamicCache))": "asserts that the cache is a DynamicCache",
    'self.assertTrue(hasattr(model, "_compiled_call"))': "asserts that a step was compiled, but unpacked sliding "
    "layers make steps eager; the report says why",
}


def version_of(checkout: Path) -> str:
    """Version of the checkout's sources, whose tests run.

    Raises:
        SystemExit: no checkout of transformers.
    """
    init = checkout / "src" / "transformers" / "__init__.py"
    if not init.is_file() or not (checkout / "tests" / "models").is_dir():
        sys.exit(f"transformers_tests: {checkout} is no checkout of transformers' repository (src/ and tests/models/)")
    line = next(line for line in init.read_text(encoding="utf-8").splitlines() if line.startswith("__version__"))
    return line.split('"')[1]


def outcomes(checkout: Path, family: str, method: str | None) -> list[dict[str, Any]]:
    """Rows of the plugin for the tests of a family, over stock models where `method` is None."""
    paths = [str(HERE), str(HERE.parent), str(HERE.parent / "kernels"), os.environ.get("PYTHONPATH", "")]
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env = {**os.environ, **offline, "PYTHONPATH": os.pathsep.join(paths), "QATTN_METHOD": method or ""}
    options = ["-q", "-s", "-p", "transformers_plugin", "-p", "no:cacheprovider", "-o", "log_cli=false"]
    file = f"tests/models/{family}/test_modeling_{family}.py"
    command = [sys.executable, "-m", "pytest", *options, "-m", "generate", file]
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    if len(rows) < 2:
        sys.exit(f"transformers_tests: no test of {family} ran\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return rows


def judged(row: dict[str, Any]) -> tuple[str, str]:
    """Outcome of a test over patched models, and why it did not pass."""
    for statement, reason in BY_DESIGN.items():
        if row["outcome"] == "failed" and row["statement"].startswith(statement):
            return "refused", reason
    return row["outcome"], row["reason"]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="transformers' generation tests over patched models, as JSON rows.")
    parser.add_argument("checkout", type=Path, help="a checkout of transformers' repository")
    parser.add_argument("--method", action="append", help=f"default: {', '.join(METHODS)}")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="default: all")
    options = parser.parse_args(arguments)
    version = version_of(options.checkout)
    for family in options.family or FAMILIES:
        head, *stock = outcomes(options.checkout, family, None)
        print(json.dumps({"family": family, "tests_of": version, **head}), flush=True)
        by_method = {
            method: {row["test"]: judged(row) for row in outcomes(options.checkout, family, method)[1:]}
            for method in options.method or METHODS
        }
        for row in stock:
            given = {method: rows[row["test"]] for method, rows in by_method.items()}
            why = {method: reason for method, (_, reason) in given.items() if reason and row["outcome"] == "passed"}
            results = {method: outcome for method, (outcome, _) in given.items()}
            line = {"family": family, "test": row["test"], "stock": row["outcome"], **results}
            print(json.dumps({**line, "reason": row["reason"], "why": why}), flush=True)


if __name__ == "__main__":
    main()
