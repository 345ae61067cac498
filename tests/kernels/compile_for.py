"""What kernels take on GPUs that are not here: `python compile_for.py '{"89": {"turbo": [128]}}' [KERNEL...]` compiles
for each compute capability what prompts and steps of the methods launch at the head dims: a JSON row a kernel.

No GPU is needed. Calls are followed up to the compiler, with the GPU's shared memory in place of this machine's, and
`ptxas` of Triton's wheel assembles. Kernels that several methods share are compiled once. KERNEL: these alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, NamedTuple

from count_kernels import KV_HEADS, follow_launches, serve

import torch  # isort: skip - after the environment is settled for Triton
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qattn_hf.methods import get_method
from qattn_hf.recipes.spelling import split_method
from qattn_kernels import chip
from qattn_kernels.launch.constants import PrefillSizes
from qattn_kernels.launch.tiles import prefill_bytes
from qattn_kernels.layer.support import unsupported

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB of a block, by NVIDIA's programming guide
MULTIPROCESSORS = 60
SHAPES = [(1, 700), (3, 3000)]  # few rows and many
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
WIDTH = 2  # bytes of a number of the model
PROCESSES = 2


class Job(NamedTuple):
    """A kernel to compile: where it was launched first, and what it is compiled from."""

    capability: int
    method: str
    dim: int
    source: Any
    options: dict[str, Any]


jobs: dict[tuple, Job] = {}


def gpu(capability: int) -> chip.Chip:
    block = SHARED[capability] * chip.KIB
    return chip.Chip(MULTIPROCESSORS, block + chip.RESERVED, chip.DEFAULT, block, divmod(capability, 10))


def note(capability: int, methods: dict[str, list[int]], names: list[str]) -> Iterator[dict[str, Any]]:
    """Put into `jobs` what calls on a GPU launch; a row for each method that it refuses."""
    chip.properties = lambda device: gpu(capability)
    for method, dims in methods.items():
        name, settings = split_method(method)
        spec = replace(get_method(name)(**settings).last_layer_spec(KV_HEADS), impl="triton")
        for dim in dims:
            row = {"capability": capability, "method": method, "dim": dim}
            if reason := unsupported(spec, KV_HEADS, dim, dim):
                yield {**row, "refused": reason}
                continue

            def see(kernel: Any, signature: Any, constants: Any, options: Any, attributes: Any, row: Any = row) -> None:
                if names and kernel.fn.__name__ not in names:
                    return
                source = ASTSource(kernel, signature, constants, attributes)
                chosen = {key: getattr(options, key) for key in OPTIONS}
                key = (
                    row["capability"],
                    kernel.fn.__name__,
                    str(signature),
                    str(constants),
                    str(attributes),
                    str(chosen),
                )
                jobs.setdefault(key, Job(*row.values(), source, chosen))

            with follow_launches(see):
                serve(spec, dim, SHAPES)


def compiled(number: int) -> dict[str, Any]:
    """A row of the job with that number."""
    job = [*jobs.values()][number]
    row = {"capability": job.capability, "method": job.method, "dim": job.dim, "kernel": job.source.name}
    try:
        made = triton.compile(job.source, target=GPUTarget("cuda", job.capability, 32), options=job.options)
    except Exception as error:  # Triton has many, and each is a row
        return {**row, "error": f"{type(error).__name__}: {error}"}
    row |= {"shared": made.metadata.shared, "limit": SHARED[job.capability] * chip.KIB}
    sizes = next((x for x in job.source.constants.values() if isinstance(x, PrefillSizes)), None)
    return row if sizes is None else {**row, "formula": prefill_bytes(sizes, WIDTH, gpu(job.capability))}


def main(wanted: str, *names: str) -> None:
    for capability, methods in json.loads(wanted).items():
        for row in note(int(capability), methods, [*names]):
            print(json.dumps(row))
    torch.set_num_threads(1)
    with get_context("fork").Pool(PROCESSES) as pool:
        for row in pool.imap_unordered(compiled, range(len(jobs))):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
