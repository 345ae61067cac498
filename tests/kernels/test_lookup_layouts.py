"""A level is looked up by four bytes that lie side by side in memory, so a thread must hold four such in a row. Layouts
are the compiler's choice, and the interpreter has none."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("lookup_layouts.py")
# what a thread holds first: neighbours in the last dimension
NEIGHBOURS = re.compile(
    r"dot_op<\{opIdx = 0, .*kWidth = [48]|register = \[\[0, 1\], \[0, 2\]|sizePerThread = \[1, (4|8|16)\]"
)
KIND = ("128", "turboquant:k_format=turbo4,v_format=turbo3")
OTHERS = [
    ("256", "turboquant:k_format=turbo3,v_format=turbo2,norm_block=null"),  # two warps share a tile of several groups
    ("256", "nf4"),
]


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [[KIND], pytest.param(OTHERS, marks=pytest.mark.exhaustive)], ids=["one", "others"])
def test_a_thread_holds_four_neighbours(kinds: list[tuple[str, str]]):
    """One process compiles several kinds: each would import torch anew."""
    found = subprocess.run([sys.executable, SCRIPT, *chain(*kinds)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    for kind in kinds:
        asked = " ".join(kind) + " "
        layouts = [line.removeprefix(asked) for line in found.stdout.splitlines() if line.startswith(asked)]
        assert len(layouts) >= 4, kind
        assert [layout for layout in layouts if not NEIGHBOURS.search(layout)] == [], kind
