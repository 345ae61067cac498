"""What tests and sanitizers showed on GPUs: gpu-tests-, racecheck- and memcheck- of `eval/results/`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from recorded import Result, load, markdown

RUNS = ("gpu-tests", "racecheck", "memcheck")


def gpu_runs_table(results: Path) -> str:
    """Passed, skipped and failed tests, or settings without a finding, a line a record."""
    lines = [
        [
            f"`{result['name']}`",
            result["device"],
            result["versions"]["transformers"],
            *(str(_outcomes(result)[outcome]) for outcome in ("passed", "skipped", "failed")),
        ]
        for run in RUNS
        for result in load(results, run)
    ]
    header = ["record", "GPU", "transformers", "passed", "skipped", "failed"]
    return markdown(header, lines) if lines else "Not measured yet."


def _outcomes(result: Result) -> Counter[str]:
    """Rows of a sanitizer are settings whose outputs were finite; its command fails at a finding."""
    return Counter(row.get("outcome", "passed" if row.get("finite") else "failed") for row in result["rows"])
