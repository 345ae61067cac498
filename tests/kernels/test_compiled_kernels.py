"""Kernels are compiled per method, not per call.

Rows, lengths and the number of programs that share a context are run-time numbers, so a new batch size does not wait
for the compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("count_kernels.py")

# The merge has three for the number of splits, a step's append one of fewer registers for many rows.
SEVERAL = {"merge_kernel": 3, "short_kernel": 2}
MOST = {"turbo": 12, "int8": 8, "sage2": 12, "turbo:bits=mixed": 20, "sinkq": 20}  # with a later prompt's own kernel


@pytest.fixture(scope="module")
def compiled() -> list[list[str]]:
    """What a process compiles for each method, by `count_kernels.py`; one for each method would import torch anew."""
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}  # else Triton 3.9 warns that its default will change
    found = subprocess.run([sys.executable, SCRIPT, *MOST], capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr
    return [line.split() for line in found.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("method", MOST)
def test_ten_shapes_compile_each_kernel_once(compiled: list[list[str]], method: str):
    kernels = Counter(name for served, when, name in compiled if (served, when) == (method, "cold"))
    assert {"long_kernel", "decode_kernel", "merge_kernel"} <= set(kernels)
    assert ("short_kernel" in kernels) == (method != "int8")  # without a ring, the decode appends
    assert all(count <= SEVERAL.get(name, 1) for name, count in kernels.items()), kernels
    assert kernels.total() <= MOST[method]


@pytest.mark.slow
@pytest.mark.parametrize("method", MOST)
def test_what_a_comparison_begins_to_compile_is_all_that_its_rows_need(compiled: list[list[str]], method: str):
    assert not [name for served, when, name in compiled if (served, when) == (method, "read")]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["turbo", "sage2", "sinkq"])
def test_what_patch_begins_to_compile_is_all_that_they_need(compiled: list[list[str]], method: str):
    assert not [name for served, when, name in compiled if (served, when) == (method, "warm")]
