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


def names(*arguments: str) -> Counter[str]:
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}  # else Triton 3.9 warns that its default will change
    found = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr
    return Counter(found.stdout.split())


@pytest.mark.parametrize("method", MOST)
def test_ten_shapes_compile_each_kernel_once(method: str):
    kernels = names(method)
    assert {"long_kernel", "short_kernel", "decode_kernel", "merge_kernel"} <= set(kernels)
    assert all(count <= 1 + (name in TWICE) for name, count in kernels.items()), kernels
    assert kernels.total() <= MOST[method]


@pytest.mark.parametrize("method", ["turbo", "sage2", "sinkq"])
def test_what_patch_begins_to_compile_is_all_that_they_need(method: str):
    assert not names(method, "warm")
