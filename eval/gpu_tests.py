"""Run the tests that need a GPU and print one JSON row per test, for `eval/record.py`.

    python eval/record.py gpu-tests -- python eval/gpu_tests.py

These tests have the mark `gpu`. They need a GPU, or test kernels, which run in Triton's interpreter without one. CI has
no GPU, so their results are kept in `eval/results/gpu-tests.json`. The command fails if a test fails, if none ran, or
without a GPU.

Arguments go to pytest, such as files to run instead of all. List the files of a folder together: pytest loses the
fixtures of a folder that it enters twice. `-n 8` runs tests in eight processes. Tests with the mark `large_memory` run
after the others, in three processes at most, because each takes up to 20 GB of the GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parent.parent / "tests"
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
            print("\n" + json.dumps(row), flush=True)


def main(arguments: list[str]) -> None:
    if not torch.cuda.is_available():
        sys.exit("gpu_tests: these tests need a CUDA GPU")
    rows = Rows()
    files = [] if any(".py" in text for text in arguments) else map(str, gpu_tests(TESTS))
    options = ["-q", "-p", "no:cacheprovider", *files, *arguments]
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
