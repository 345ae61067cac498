"""The functions of the kernels read all that they take."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import qattn_kernels

PACKAGE = Path(qattn_kernels.__file__).parent
# of functions that all formats have: what one of them does not need
INTERFACES = {"block_form": {"keep"}, "encode": {"SIDE"}, "levels": {"BITS"}, "half_offsets": {"BITS"}}


def functions() -> Iterator[tuple[str, ast.FunctionDef, list[str]]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                yield f"{path.relative_to(PACKAGE)}: {node.name}", node, [x.arg for x in taken]


def test_kernels_read_all_that_they_take():
    unread = {}
    for name, node, taken in functions():
        if not any("jit" in ast.unparse(x) for x in node.decorator_list):
            continue
        read = {x.id for line in node.body for x in ast.walk(line) if isinstance(x, ast.Name)}
        left = set(taken) - read - INTERFACES.get(node.name, set())
        unread |= {name: left} if left else {}
    assert unread == {}
