"""The oldest supported Triton reads every kernel. Its language is smaller: it has no `len` of arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from qattn_hf.methods import list_methods

SCRIPT = Path(__file__).resolve().parents[2] / "eval" / "compile_for.py"
OLDEST = "3.6."  # as pyproject.toml says, and constraints-oldest.txt
MORE = ["turbo:bits=mixed", "turbo_rotated", "low2", "sage2:bits=4"]  # ranked heads, rotation, pools, packed queries


@pytest.mark.skipif(
    not triton.__version__.startswith(OLDEST), reason="needs the oldest Triton; test_other_gpus.py compiles with others"
)
def test_every_kernel_is_translated():
    ways = [f"--method={way}" for way in (*list_methods(), *MORE) if way != "none"]
    command = [sys.executable, SCRIPT, "--translate", "--target=90", "--dim=64", *ways]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"})
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert found.returncode == 0, [row.get("errors") for row in rows] + [found.stderr[-2000:]]
    assert len(rows) == len(ways) and all(row["kernels"] >= 5 for row in rows)
