"""How threads hold the bytes that the decode kernel looks levels up by: `python lookup_layouts.py DIM METHOD...`
prints `DIM METHOD LAYOUT` for each lookup, the layout as in Triton's GPU dialect.

The kernel is compiled for a Hopper GPU and not run; no GPU is needed.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

from count_kernels import KV_HEADS, JITFunction, follow_launches, get_method, serve, split_method

COMPILE = JITFunction._do_compile
NAMED = re.compile(r"^(#\w+) = (.*)$", re.MULTILINE)
LOOKUP = re.compile(r'elementwise_inline_asm "[^"]*prmt\.b32 l0.* : tensor<\w+xi8, (#.+?)> -> ')


def layouts(text: str) -> list[str]:
    """Of each lookup in a kernel's text."""
    known = dict(NAMED.findall(text))
    return [known.get(name, name) for name in LOOKUP.findall(text)]


def main(*kinds: str) -> None:
    for dim, method in zip(kinds[::2], kinds[1::2], strict=True):
        name, settings = split_method(method)
        texts: list[str] = []
        with follow_launches(lambda *_: None):
            skip = JITFunction._do_compile

            def compile_decode(self: Any, *args: Any, skip: Any = skip, texts: list[str] = texts) -> object:
                if self.fn.__name__ != "decode_kernel":
                    return skip(self, *args)
                kernel = COMPILE(self, *args)
                texts.append(kernel.asm["ttgir"])
                return kernel

            JITFunction._do_compile = compile_decode
            spec = replace(get_method(name)(**settings).last_layer_spec(KV_HEADS), impl="triton")
            serve(spec, int(dim), [(2, 300)])
        for layout in (layout for text in texts for layout in layouts(text)):
            print(dim, method, layout)


if __name__ == "__main__":
    main(*sys.argv[1:])
