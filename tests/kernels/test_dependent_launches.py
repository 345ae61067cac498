"""Kernels of a step are launched before the previous one has ended, so each must wait before it reads or writes.

The interpreter has neither, so the kernels' code is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("dependent_launches.py")
KERNELS = {"short_kernel", "decode_kernel", "merge_kernel"}
METHODS = ["int8", "turbo", "kivi", "turboquant", "sinkq"]


@pytest.mark.slow
def test_kernels_that_are_launched_early_wait_first():
    found = subprocess.run([sys.executable, SCRIPT, *METHODS], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    rows = [line.split() for line in found.stdout.splitlines()]
    hopper = [row[1:] for row in rows if row[0] == "90"]
    assert {name for name, *_ in hopper} == KERNELS
    for name, launch, order in hopper:
        assert launch == "early" and order.startswith("wait,") and order.count("wait") == 1, name
        # a release before the loads would let the next kernel's programs take up places for as long as the decode runs
        assert ("release" in order) == (name == "decode_kernel") and order.endswith("store"), name
    ampere = [row[1:] for row in rows if row[0] == "80"]
    assert {name for name, *_ in ampere} == KERNELS
    for name, launch, order in ampere:
        assert launch == "late" and "wait" not in order and "release" not in order, name
