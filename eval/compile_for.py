"""Compile kernels for GPUs that need not be here, and print what they take: one JSON row a target, method and head dim.

    python eval/record.py gpus:all -- python eval/compile_for.py --processes 16
    python eval/compile_for.py --target 86 --target 89 --method turbo:bits=2 --dim 128 --kernel attend

Without options it compiles all targets, methods and head dims: some 8,000 kernels of about four seconds of one core.

A row counts the kernels that a prompt, steps and a later prompt launch. It has the largest shared memory of a program,
registers of a thread, and bytes of a thread's stack, which holds spilled registers; each with its kernel. Or it says
why the target refuses the method. `ptxas` and `cuobjdump` of Triton's wheel assemble and count. A kernel that several
rows launch is compiled once, and Triton's cache keeps it for the next command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle, islice, product
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from qattn_hf.methods import measured_settings
from qattn_hf.recipes.spelling import split_method
from qattn_kernels.chip import KIB, SHARED, as_chip, chip_with
from qattn_kernels.launch.constants import PrefillSizes
from qattn_kernels.launch.tiles import prefill_bytes
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.support import unsupported
from qattn_kernels.step.warm import LayerShape, launches

DIMS = (64, 80, 96, 112, 128, 192, 256)
HEADS, KV_HEADS = 32, 8
DTYPE = torch.bfloat16
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl")
FIGURES = ("shared", "registers", "stack")


class Target:
    """A driver for a GPU of a compute capability, without a GPU."""

    def __init__(self, capability: int = 90) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def follow_launches(see: Callable[..., None], capability: int = 90) -> Iterator[None]:
    """In this context launches compile and run nothing. `see(kernel, signature, constants, options, attributes)` gets
    each kernel that was not there; afterwards none is, so that another context sees it again."""
    launch, seen = JITFunction.run, []

    def compile_nothing(
        self: Any, key: str, signature: Any, device: int, constants: Any, options: Any, attributes: Any, *rest: Any
    ) -> object:
        see(self, signature, constants, options, attributes)
        seen.append(self)
        kernel = self.device_caches[device][0][key] = object()
        return kernel

    def launch_nothing(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    driver.set_active(Target(capability))
    try:
        with (
            patch.object(JITFunction, "_do_compile", compile_nothing),
            patch.object(JITFunction, "run", launch_nothing),
            patch.object(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext()),
        ):
            yield
    finally:
        for kernel in seen:
            kernel.device_caches.clear()


class Job(NamedTuple):
    """A kernel to compile: for which capability, from what, with which options."""

    capability: int
    source: Any
    options: dict[str, Any]

    def key(self) -> tuple[str, ...]:
        made = self.source
        parts = (made.fn.__name__, made.signature, made.constants, made.attrs, self.options)
        return str(self.capability), *map(str, parts)


def jobs_of(spec: LayerSpec, capability: int, dim: int, names: list[str]) -> list[Job]:
    """Return the kernels that a layer launches on a target, or only those in `names` if it is not empty."""
    jobs: list[Job] = []

    def see(kernel: Any, signature: Any, constants: Any, options: Any, attributes: Any) -> None:
        if not names or kernel.fn.__name__ in names:
            source = ASTSource(kernel, signature, constants, attributes)
            jobs.append(Job(capability, source, {key: getattr(options, key) for key in OPTIONS}))

    with follow_launches(see, capability):
        for one in launches(LayerShape(spec, HEADS, KV_HEADS, dim, DTYPE, torch.device("cpu"))):
            one.kernel.warmup(*one.arguments, grid=one.grid, **one.options)
    return jobs


def compiled(job: Job) -> dict[str, Any]:
    """Compile a kernel: bytes of shared memory, registers and stack, or the `error`.

    `over` is by how many bytes its shared memory exceeds the formula that chooses tiles (`launch.tiles`), if it does.
    """
    driver.set_active(Target(job.capability))
    try:
        made = triton.compile(job.source, target=GPUTarget("cuda", job.capability, 32), options=job.options)
    except Exception as error:  # Triton has many, and each is a row
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    found = {"shared": made.metadata.shared, **resources(made.asm["cubin"])}
    sizes = next((x for x in job.source.constants.values() if isinstance(x, PrefillSizes)), None)
    if sizes is not None:
        found["over"] = max(0, found["shared"] - prefill_bytes(sizes, DTYPE.itemsize, chip_with(job.capability)))
    return found


def translated(job: Job) -> dict[str, Any]:
    """Translate a kernel to Triton's own code and no further, which takes a tenth of the time; or the `error`."""
    try:
        front_end(job)
    except Exception as error:  # as in `compiled`
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return {}


def front_end(job: Job, *stages: str) -> str:
    """Return a kernel in Triton's own code, after these first stages of the compiler."""
    target, made = GPUTarget("cuda", job.capability, 32), job.source
    backend, context, steps = make_backend(target), ir.context(), dict[str, Callable[[Any, dict[str, Any]], Any]]()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(job.options)
    backend.add_stages(steps, options, made.language)
    code = made.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    for stage in stages:
        code = steps[stage](code, {})
    return str(code)


def resources(cubin: bytes) -> dict[str, int]:
    """Return registers and bytes of stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert found is not None, printed
    return {"registers": int(found[1]), "stack": int(found[2])}


results: dict[tuple[str, ...], dict[str, Any]] = {}  # of kernels that were compiled
waiting: list[Job] = []  # what a forked process finds by number: a job cannot be pickled


def _numbered(by: Callable[[Job], dict[str, Any]], number: int) -> dict[str, Any]:
    return by(waiting[number])


def compile_all(jobs: list[Job], processes: int, by: Callable[[Job], dict[str, Any]] = compiled) -> None:
    """Compile or translate what `results` lacks."""
    missing = {job.key(): job for job in jobs if job.key() not in results}
    waiting[:] = missing.values()
    if processes > 1 and len(waiting) > 1:
        with get_context("fork").Pool(processes) as pool:
            made = pool.map(partial(_numbered, by), range(len(waiting)), chunksize=1)
    else:
        made = [by(job) for job in waiting]
    results.update(zip(missing, made, strict=True))


def figures(jobs: list[Job], capability: int) -> dict[str, Any]:
    """Return the largest figures of compiled kernels, each with its kernel, and what is wrong."""
    found = [(job.source.fn.__name__, results[job.key()]) for job in jobs]
    row: dict[str, Any] = {"kernels": len(jobs)}
    for figure in FIGURES:
        made = [(one[figure], name) for name, one in found if figure in one]
        if made:
            row[figure], row[f"{figure}_of"] = max(made)
    limit = SHARED[capability] * KIB
    errors = [f"{name}: {one['error']}" for name, one in found if "error" in one]
    errors += [f"{name}: {one['shared']} bytes of {limit}" for name, one in found if one.get("shared", 0) > limit]
    errors += [f"{name}: {one['over']} bytes above the formula" for name, one in found if one.get("over")]
    return {**row, "limit": limit, **({"errors": errors} if errors else {})}


def wanted(targets: list[int], methods: list[str], dims: list[int], once: bool) -> list[tuple[int, str, int]]:
    """Return all combinations, or with `once` as few as meet each target, method and head dim."""
    if not once:
        return [*product(targets, methods, dims)]
    most = max(len(targets), len(methods), len(dims))
    return [*islice(zip(cycle(targets), cycle(methods), cycle(dims), strict=False), most)]


def row(
    capability: int, method: str, dim: int, names: list[str], processes: int, by: Callable[[Job], dict[str, Any]]
) -> dict[str, Any]:
    """Compile or translate what a target, method and head dim need, and return the row."""
    from qattn_hf.recipes.recipe import find_recipe  # loads Transformers, which `jobs_of` does without

    name, settings = split_method(method)
    spec = find_recipe(name, None, settings).settings.last_layer_spec(KV_HEADS)
    found = {"capability": capability, "way": method, "head_dim": dim, **({"only": names} if names else {})}
    with as_chip(chip_with(capability)):
        if reason := unsupported(spec, KV_HEADS, dim, dim):
            return {**found, "refused": reason}
        jobs = jobs_of(replace(spec, impl="triton"), capability, dim, names)
    compile_all(jobs, processes, by)
    return {**found, **figures(jobs, capability)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compile kernels for GPUs that need not be here.")
    parser.add_argument("--target", type=int, action="append", choices=SHARED, help="compute capability; default: all")
    parser.add_argument("--method", action="append", help="default: all that decode is measured with")
    parser.add_argument("--dim", type=int, action="append", help=f"head dim; default: {', '.join(map(str, DIMS))}")
    parser.add_argument("--once", action="store_true", help="as few rows as meet each of these")
    parser.add_argument("--kernel", action="append", default=[], help="compile these kernels alone")
    parser.add_argument("--translate", action="store_true", help="only to Triton's own code, without figures")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    methods, bad = given.method or [*measured_settings("decode")], False
    for one in wanted(given.target or [*SHARED], methods, given.dim or [*DIMS], given.once):
        made = row(*one, given.kernel, given.processes, translated if given.translate else compiled)
        print(json.dumps(made), flush=True)
        bad |= "errors" in made
    if bad:
        sys.exit("compile_for: some kernels do not compile, or need more than a program may have")


if __name__ == "__main__":
    main()
