"""How threads hold the bytes that the decode kernel looks levels up by: `python lookup_layouts.py DIM METHOD...`
prints `DIM METHOD LAYOUT` for each lookup, the layout as in Triton's GPU dialect.

The kernel is compiled for a Hopper GPU as far as that dialect; no GPU is needed.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "eval"))

from compile_for import KV_HEADS, front_end, jobs_of  # first: it turns Triton's interpreter off

from qattn_hf.methods import get_method
from qattn_hf.recipes.spelling import split_method

HOPPER = 90
NAMED = re.compile(r"^(#\w+) = (.*)$", re.MULTILINE)
LOOKUP = re.compile(r'elementwise_inline_asm "[^"]*prmt\.b32 l0.* : tensor<\w+xi8, (#.+?)> -> ')


def layouts(text: str) -> list[str]:
    """Of each lookup in a kernel's text."""
    known = dict(NAMED.findall(text))
    return [known.get(name, name) for name in LOOKUP.findall(text)]


def main(*kinds: str) -> None:
    for dim, method in zip(kinds[::2], kinds[1::2], strict=True):
        name, settings = split_method(method)
        spec = replace(get_method(name)(**settings).last_layer_spec(KV_HEADS), impl="triton")
        for job in jobs_of(spec, HOPPER, int(dim), ["decode_kernel"]):
            for layout in layouts(front_end(job, "ttir", "ttgir")):
                print(dim, method, layout)


if __name__ == "__main__":
    main(*sys.argv[1:])
