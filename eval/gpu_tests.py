"""Run the tests that need a GPU and print one JSON row per test, for `eval/record.py`.

    python eval/record.py gpu-tests -- python eval/gpu_tests.py

These tests have the mark `gpu`. They need a GPU, or test kernels, which run in Triton's interpreter without one. CI has
no GPU, so their results are kept in `eval/results/gpu-tests.json`. The command fails if a test fails, if none ran, or
without a GPU.

Arguments go to pytest, such as files to run instead of all. `-n 8` runs tests in eight processes. Tests with the mark
`large_memory` run after the others, in three processes at most, because each takes up to 20 GB of the GPU.

`--after RUN` continues the run `RUN` of the record, which ended early: it leaves out the tests that passed or were
skipped there, except those without parameters. `--after RUN,RUN` continues several. The row of a failed test has its
`error`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from recorded import runs_of

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
RECORD = ROOT / "eval" / "results" / "gpu-tests.json"
AT_ONCE = 3  # tests with the mark `large_memory` that fit a GPU of 80 GB


def gpu_tests(folder: Path) -> list[Path]:
    """Files in which a test has the mark `gpu`: no other is imported, so that only their libraries are needed."""
    return sorted(path for path in folder.rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8"))


class Rows:
    """Prints a row for each test: those that ran, were skipped, or could not be set up."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.append(report.outcome)
            file, _, test = report.nodeid.rpartition(".py::")
            row = {
                "file": Path(file).name,
                "test": test,
                "outcome": report.outcome,
                "seconds": round(report.duration, 2),
            }
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                row["error"] = (crash.message if crash else report.longreprtext).partition("\n")[0]
            print("\n" + json.dumps(row), flush=True)


def left_out(names: list[str]) -> list[str]:
    """Options that leave out tests with parameters that these runs ended. pytest takes whole names for prefixes."""
    runs = {each["run"]: each["rows"] for each in runs_of(RECORD)}
    if unknown := [name for name in names if name not in runs]:
        sys.exit(f"gpu_tests: --after {','.join(unknown)}: {RECORD.name} has the runs {', '.join(runs)}")
    folders = {path.stem: path for path in gpu_tests(TESTS)}
    rows = [row for name in names for row in runs[name]]
    ended = [row for row in rows if row["outcome"] != "failed" and row["test"].endswith("]")]
    paths = [(folders[row["file"]].relative_to(ROOT), row["test"]) for row in ended if row["file"] in folders]
    return [f"--deselect={path.as_posix()}::{test}" for path, test in paths]


def main(arguments: list[str]) -> None:
    if not torch.cuda.is_available():
        sys.exit("gpu_tests: these tests need a CUDA GPU")
    made = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    made.add_argument("--after")
    chosen, arguments = made.parse_known_args(arguments)
    rows = Rows()
    files = [text for text in arguments if ".py" in text] or list(map(str, gpu_tests(TESTS)))
    files.sort(key=os.path.dirname)  # pytest loses the fixtures of a folder that it enters twice
    arguments = [text for text in arguments if ".py" not in text]
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        *files,
        *arguments,
        *(left_out(chosen.after.split(",")) if chosen.after else []),
    ]
    few = ["-n", str(AT_ONCE)] if any(text.startswith("-n") for text in arguments) else []
    codes = [
        pytest.main([*options, "-m", "gpu and not large_memory"], plugins=[rows]),
        pytest.main([*options, *few, "-m", "gpu and large_memory"], plugins=[rows]),
    ]
    code = next((code for code in codes if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)), 0)
    if not code and "passed" not in rows.outcomes:
        sys.exit("gpu_tests: no test ran")
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
