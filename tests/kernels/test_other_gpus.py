"""GPUs with less shared memory than Hopper get tiles that fit and compute the same.

Kernels are compiled for such GPUs, which needs no GPU, and run with limited shared memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DEVICE, error, make_layer
from test_fused_kernels import differing, feed, inputs

from qattn_hf.methods import get_method, list_methods
from qattn_kernels import chip
from qattn_kernels.chip import DEFAULT, H200, KIB, LIMIT, Chip, chip_of
from qattn_kernels.launch.constants import PrefillSizes
from qattn_kernels.launch.tiles import first_that_fits, prefill_bytes, prefill_tiles
from qattn_kernels.launch.tuned import Prefill
from qattn_kernels.layer.support import LEAST_SHARED, unsupported
from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.warm import LayerShape, launches

SCRIPT = Path(__file__).resolve().parents[2] / "eval" / "compile_for.py"
METHODS = ["turbo", "int8", "sinkq", "nf4", "turboquant", "fp8", "kivi"]
DIMS, TARGETS = [64, 80, 96, 112, 128, 192, 256], [80, 86, 89, 90, 100, 120]
MOST_STACK = 512  # bytes of a thread's spilled registers; 296 are the most recorded, of `int8` on capability 10.0

# Queries, slots of a tile, slots of a tail, loads in flight and warps of a prefill on Hopper, by method and head dim
ON_HOPPER = {
    "turbo": {64: (64, 128, 128, 3, 4), 128: (64, 128, 128, 3, 4), 256: (64, 64, 64, 2, 8)},
    "int_flash": {64: (64, 128, 64, 3, 4), 128: (64, 128, 64, 3, 4), 256: (64, 64, 64, 2, 8)},
    "sage2": {64: (64, 128, 64, 3, 4), 128: (64, 128, 64, 3, 4), 256: (64, 64, 64, 2, 8)},
    "turboquant": {64: (64, 64, 64, 3, 4), 128: (128, 128, 64, 3, 8), 256: (64, 64, 64, 2, 8)},
    "kivi": {64: (64, 64, 32, 3, 4), 128: (128, 64, 32, 3, 8), 256: (64, 64, 32, 2, 8)},
}


def gpu(kib: int, capability: tuple[int, int] = (8, 6)) -> Chip:
    """A GPU whose programs have `kib` KiB of shared memory."""
    return Chip(60, (kib + 1) * KIB, DEFAULT, kib * KIB, capability)


def tiles_of(method: str, dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[int, ...]:
    """What a prompt's `attend` would be launched with: see `ON_HOPPER`."""
    spec = replace(get_method(method)().last_layer_spec(2), impl="triton")
    found = launches(LayerShape(spec, 4, 2, dim, dtype, torch.device("cpu")))
    options = next(one.options for one in found if one.kernel.fn.__name__ == "attend")
    size = options["C"]
    assert options["num_stages"] == size.STAGES
    return size.BM, size.BN, size.TAIL, size.STAGES, options["num_warps"]


ON_OTHERS = [
    (gpu(99), "turboquant", 128, (64, 64, 64, 2, 4)),
    (gpu(99), "turboquant", 256, (64, 32, 32, 2, 8)),
    (gpu(99, (12, 0)), "kivi", 256, (64, 32, 32, 2, 8)),
    (gpu(99, (8, 9)), "turbo", 128, (64, 128, 128, 3, 4)),
    (gpu(99, (9, 0)), "turbo", 128, (64, 128, 128, 2, 4)),  # Hopper's products hold a tile longer
    (gpu(163, (8, 0)), "turboquant", 128, (64, 64, 64, 2, 4)),
    (gpu(163, (8, 0)), "turboquant", 256, (64, 64, 64, 2, 8)),
    (gpu(64), "turbo", 128, (64, 128, 128, 2, 4)),
    (gpu(227, (9, 0)), "turbo", 512, (64, 64, 64, 2, 8)),
    (gpu(227, (9, 0)), "turboquant", 512, (64, 32, 32, 2, 8)),
    (gpu(163, (8, 0)), "turbo", 512, (64, 64, 64, 2, 8)),
    (gpu(163, (8, 0)), "turboquant", 512, (32, 32, 32, 2, 8)),
]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this machine's device another one."""
    return lambda other: monkeypatch.setattr(chip, "properties", lambda device: other)


def test_hopper_keeps_the_tiles_that_were_measured():
    assert {method: {dim: tiles_of(method, dim) for dim in dims} for method, dims in ON_HOPPER.items()} == ON_HOPPER


def test_tiles_fit_the_gpu(on: Any):
    for other, method, dim, tiles in ON_OTHERS:
        on(other)
        assert tiles_of(method, dim) == tiles, (other, method)


def test_the_environment_limits_a_gpu_and_never_enlarges_it(on: Any, monkeypatch: pytest.MonkeyPatch):
    cpu = torch.device("cpu")
    monkeypatch.setenv(LIMIT, "99")
    assert chip_of(cpu) == H200._replace(block=99 * KIB, shared=100 * KIB)
    on(gpu(64))
    assert chip_of(cpu) == gpu(64)
    for text in ("99 KiB", "-1", "0", "²"):
        monkeypatch.setenv(LIMIT, text)
        with pytest.raises(ValueError, match=f"{LIMIT} is .*: set a positive integer"):
            chip_of(cpu)
    monkeypatch.setenv(LIMIT, "")
    assert chip_of(cpu) == gpu(64)


def a_size(one: Prefill, dim: int, codes: bool) -> PrefillSizes:
    """Of all that a prefill is compiled for, what its shared memory depends on."""
    nothing = PrefillSizes(*[0] * len(PrefillSizes._fields))
    tiles = {"BM": one.queries, "BN": one.bn, "TAIL": one.tail, "STAGES": one.stages, "DP": dim, "DVP": dim}
    return nothing._replace(**tiles, K_INT8=codes, V_INT8=codes, SMOOTH_Q="block")


def test_some_tiles_fit_every_gpu_that_support_takes():
    for dim, capability in product((64, 128, 256, 512), [(8, 6), (9, 0)]):
        least = gpu(next(kib for most, kib in LEAST_SHARED.items() if dim <= most), capability)
        for kind, width, codes in (("int8", 4, True), ("fp8", 4, True), ("half", 2, False), ("float", 4, False)):
            needs = [prefill_bytes(a_size(one, dim, codes), width, least) for one in prefill_tiles(least, kind, dim)]
            assert min(needs) <= least.block, (kind, dim, capability)


def test_the_first_that_fits_is_taken_and_none_is_an_error():
    tiles = prefill_tiles(H200, "int8", 128)
    needs = dict(zip(tiles, (100 * KIB, 70 * KIB, 60 * KIB), strict=True)).__getitem__
    assert [first_that_fits(tiles, needs, gpu(kib)) for kib in (100, 99, 69)] == [*tiles]
    with pytest.raises(ValueError, match="needs 60 KiB of shared memory, and this GPU gives it 59"):
        first_that_fits(tiles, needs, gpu(59))


def test_a_gpu_without_room_is_refused_in_words(on: Any, monkeypatch: pytest.MonkeyPatch):
    spec = get_method("int8")().layer_spec(0, 1, 2)
    on(gpu(64))
    assert unsupported(spec, 2, 128, 128) is None
    assert unsupported(spec, 2, 256, 256) == (
        "kernels for head dim 256 need 99 KiB of shared memory a block, and this GPU has 64"
    )
    wide_blocks = get_method("kivi")(group_size=128).layer_spec(0, 1, 2)
    on(gpu(163, (8, 0)))
    assert unsupported(spec, 2, 512, 512) is None
    assert unsupported(wide_blocks, 2, 512, 512) == (
        "kernels for head dim 512 and blocks of 128 tokens need 227 KiB of shared memory a block, and this GPU has 163"
    )
    on(gpu(227, (10, 0)))
    assert unsupported(spec, 2, 256, 256) is None
    assert unsupported(spec, 2, 512, 512).endswith("exceed the tensor memory of GPUs of compute capability 10")
    on(gpu(99))
    assert unsupported(spec, 2, 264, 264) == (
        "kernels for head dim 264 need 163 KiB of shared memory a block, and this GPU has 99"
    )
    on(gpu(64))
    monkeypatch.setenv(LIMIT, "32")
    assert unsupported(spec, 2, 64, 64).endswith(f"this GPU has 32 ({LIMIT} limits it)")


@pytest.mark.gpu
def test_fp8_is_stored_and_read_on_a_gpu_without_it(on: Any):
    """The same bytes, and outputs as with FP8 instructions: E4M3 is exact in fp16 either way."""
    qkv = inputs(1, 66)
    layers = [make_layer(("fp8", {}), 128, 2) for _ in range(2)]
    full = feed(fused_step, layers[0], qkv, [65, 66])
    on(gpu(163, (8, 0)))
    shifted = feed(fused_step, layers[1], qkv, [65, 66])
    assert differing(*layers) == []
    assert all(map(torch.equal, shifted, full))


def compiled(targets: list[int], methods: list[str], dims: list[int], *kernels: str) -> list[dict[str, Any]]:
    """Rows of `eval/compile_for.py --once`: every kernel compiled, fits, and takes no more than its formula says."""
    asked = {"target": targets, "method": methods, "dim": dims, "kernel": kernels}
    options = [f"--{name}={value}" for name, values in asked.items() for value in values]
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}  # else Triton 3.9 warns that its default will change
    environment.pop(LIMIT, None)
    command = [sys.executable, SCRIPT, "--once", *options]
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert found.returncode == 0, [row.get("errors") for row in rows] + [found.stderr]
    return rows


def test_one_method_fits_each_gpu():
    """Those methods and head dims that Hopper's tiles would not fit, and FP8 on a GPU without it."""
    targets, methods = [75, 80, 86, 89, 90, 120], ["turbo", "fp8", "kivi", "turboquant", "sinkq", "nf4"]
    rows = compiled(targets, methods, [64, 112, 256, 80, 192, 128], "attend")
    assert [row["kernels"] for row in rows[1:]] == [1] * (len(targets) - 1)
    assert rows[0]["refused"].startswith("kernels need compute capability 8.0")


@pytest.mark.slow
def test_every_method_target_and_head_dim_compiles_once():
    """The kernels that read tiles. `eval/compile_for.py` compiles the others too."""
    rows = compiled(TARGETS, list_methods(), DIMS, "attend", "decode_kernel")
    made = [row for row in rows if "refused" not in row]
    alone = {"int8", "fp8"}  # with many short rows, one program reads a whole row and stores the output
    assert [row["kernels"] for row in made] == [2 + (row["way"] in alone) for row in made]
    assert {row["way"] for row in rows if "refused" in row} <= {"sage2"}
    assert max(row["stack"] for row in made) <= MOST_STACK


@pytest.mark.exhaustive
def test_wide_heads_compile():
    for kernel in ("attend", "decode_kernel"):
        rows = compiled([80, 90], ["turbo", "int8"], [512], kernel)
        assert max(row["stack"] for row in rows) <= MOST_STACK


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("kib", [99, 163])
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("method", METHODS)
def test_less_shared_memory_changes_the_order_of_sums_alone(
    method: str, dim: int, kib: int, monkeypatch: pytest.MonkeyPatch
):
    """A prompt, steps and a later prompt: the state bit for bit, and outputs nearly, as with the tiles of this GPU."""
    qkv = tuple(x.to(torch.bfloat16) for x in inputs(1, 150, heads=1, group=2, dim=dim))
    cuts = [100, 101, 103, 150]
    case = (method, {})
    one, other = make_layer(case, 256, 1), make_layer(case, 256, 1)
    full = feed(fused_step, one, qkv, cuts)
    monkeypatch.setenv(LIMIT, str(kib))
    limited = feed(fused_step, other, qkv, cuts)
    assert differing(one, other) == []
    # weights are rounded to bf16 against the largest score so far, which is another one where tiles differ
    rounding = 2 * torch.finfo(torch.bfloat16).eps
    assert all(error(a, b) < rounding for a, b in zip(limited, full, strict=True))
    assert all(x.isfinite().all() and x.device.type == DEVICE for x in limited)
