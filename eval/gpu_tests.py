"""Run the tests that need a GPU and print one JSON row a test, for `eval/record.py`.

    python eval/record.py gpu-tests -- python eval/gpu_tests.py

CI has no GPU, so what these tests showed is kept in `eval/results/gpu-tests.json`. Fails if one fails or none ran.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent / "tests" / "test_cuda.py"


class Rows:
    """Prints a row for each test that ran."""

    ran = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.ran += 1
            row = {
                "test": report.nodeid.split("::")[-1],
                "outcome": report.outcome,
                "seconds": round(report.duration, 2),
            }
            print("\n" + json.dumps(row), flush=True)


def main() -> None:
    rows = Rows()
    code = pytest.main(["-q", "-p", "no:cacheprovider", str(TESTS)], plugins=[rows])
    sys.exit(code or (0 if rows.ran else "gpu_tests: no test ran; they need a CUDA GPU"))


if __name__ == "__main__":
    main()
