"""Which kernels are launched before the previous one has ended, and whether they wait for it first:
`python dependent_launches.py METHOD...` prints `CAPABILITY KERNEL LAUNCH ORDER` for each kernel: of the first method
for a GPU without such launches too.

`LAUNCH` is `early` or `late`. `ORDER` has the waits, loads, stores and releases of the kernel's code, in its order,
without repetitions. No GPU is needed.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "eval"))

from compile_for import KV_HEADS, front_end, jobs_of  # first: it turns Triton's interpreter off

from qattn_hf.methods import get_method
from qattn_hf.recipes.spelling import split_method
from qattn_kernels.chip import as_chip, chip_with

STEPS = ["short_kernel", "decode_kernel", "merge_kernel"]
WAIT, RELEASE = r"dependency_wait|griddepcontrol[._]wait", r"launch_dependents"  # the first is Triton 3.9's
FOUND = re.compile(rf"(?P<wait>{WAIT})|(?P<release>{RELEASE})|tt\.(?P<load>load)|tt\.(?P<store>store|atomic_rmw)")


def main(*methods: str) -> None:
    for method in methods:
        name, settings = split_method(method)
        spec = replace(get_method(name)(**settings).last_layer_spec(KV_HEADS), impl="triton")
        for capability in (80, 90) if method == methods[0] else (90,):
            with as_chip(chip_with(capability)):
                jobs = jobs_of(spec, capability, 128, STEPS)
            for job in jobs:
                order = [one.lastgroup for one in FOUND.finditer(front_end(job, "ttir"))]
                launch = "early" if job.options["launch_pdl"] else "late"
                print(capability, job.source.fn.__name__, launch, ",".join(key for key, _ in groupby(order)))


if __name__ == "__main__":
    main(*sys.argv[1:])
