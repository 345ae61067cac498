"""Kernels belong to a method, not to a call: rows, lengths and how many programs share a context are run-time numbers,
so that nobody waits for the compiler at each new batch size."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("count_kernels.py")


# The merge has one for few and one for many splits, the pool of sinks one for prompts and one for steps.
TWICE = {"merge_kernel", "pool_kernel"}
MOST = {"turbo": 12, "int8": 12, "sage2": 13, "turbo:bits=mixed": 20, "sinkq": 20}  # with a later prompt's own kernel


@pytest.mark.parametrize("method", MOST)
def test_ten_shapes_compile_each_kernel_once(method: str):
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}  # else Triton 3.9 warns that its default will change
    found = subprocess.run([sys.executable, SCRIPT, method], capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr
    kernels = Counter(found.stdout.split())
    assert {"long_kernel", "short_kernel", "decode_kernel", "merge_kernel"} <= set(kernels)
    assert all(count <= 1 + (name in TWICE) for name, count in kernels.items()), kernels
    assert kernels.total() <= MOST[method]
