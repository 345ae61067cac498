"""A format owns itself: one folder, found by its name, and nobody else asks which one it is."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
from helpers import feed, make_layer, random_qkv

import qattn_kernels
from qattn_kernels.formats import get_format
from qattn_kernels.formats.contract import JitFormat
from qattn_kernels.layer.state import side_of

PACKAGE = Path(qattn_kernels.__file__).parent
FORMATS = sorted(path.parent.name for path in PACKAGE.glob("formats/*/reference.py"))
BASES = ("channel_block",)  # what several formats share
WRAPPERS = ("smoothed",)  # whose codes another format holds


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in BASES])
def test_a_format_is_found_by_the_name_of_its_folder(name: str):
    assert get_format(name).name == name
    assert get_format(name)().core.name == name or name in WRAPPERS


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in (*BASES, *WRAPPERS)])
def test_kernels_know_a_format_by_one_typed_object(name: str):
    jit = importlib.import_module(f"qattn_kernels.formats.{name}.jit").JIT
    assert isinstance(jit, JitFormat)
    assert jit.scores is not None or jit.values is not None
    if get_format(name).windowed:
        assert "ring" in jit.Tensors._fields
        assert jit.ring_scores is not None or jit.ring_values is not None


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in (*BASES, *WRAPPERS)])
def test_a_format_that_stores_blocks_in_its_own_way_closes_them_so_too(name: str):
    """A format derived with `_replace` inherits `close`, which would store blocks as the other format does."""
    jit = importlib.import_module(f"qattn_kernels.formats.{name}.jit").JIT
    if jit.close is not None:
        assert jit.close.__module__.rpartition(".")[0] == jit.put.__module__.rpartition(".")[0]


def test_a_function_that_is_missing_fails_at_once():
    with pytest.raises(TypeError, match="required positional argument"):
        JitFormat(Tensors=tuple, quantize_tokens=None)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="unexpected field names"):
        importlib.import_module("qattn_kernels.formats.int8.jit").JIT._replace(scorse=None)


def test_no_other_module_of_the_package_names_a_format():
    named = []
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE)
        if where.parts[0] == "formats":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module is not None and module.startswith("qattn_kernels.formats."):
                named += [f"{where}: {module}"] if module.split(".")[2] in FORMATS else []
            if isinstance(node, ast.Compare) and any(
                isinstance(x, ast.Constant) and x.value in set(FORMATS) - {"model", "int8", "fp8"}
                for x in (node.left, *node.comparators)
            ):
                named.append(f"{where}: line {node.lineno}")
    # kernels of a prefill quantize with the functions of two formats
    assert {x for x in named if not x.startswith("ops/prefill/")} == set()


BITS = [
    *(("nf4", {"group_size": size}, 128, bits) for size, bits in ((32, 4.5), (64, 4.25), (128, 4.125))),
    *(
        ("turboquant", {"k_format": name, "v_format": name}, 64, bits)
        for name, bits in (("turbo4", 4.5), ("turbo3", 3.5), ("turbo2", 2.5), ("q4", 4.5), ("q8", 8.5))
    ),
    ("turboquant", {"k_format": "turbo4", "v_format": "turbo4"}, 80, 4 + 3 * 16 / 80),  # groups of 32, 32 and 16
]


def test_bits_of_a_value():
    for method, settings, dim, bits in BITS:
        layer = make_layer((method, settings))
        feed(layer, *random_qkv(1, 64, dim=dim), [64])
        for side in "kv":
            state = side_of(layer.state, side)
            held = sum(8 * state[key][0, 0, 0].nbytes for key in ("codes", "scale"))
            assert held == pytest.approx(bits * 64 * dim), (method, settings)
