"""Measured launch configurations, one JSON file per GPU.

A file has the GPU's name in lower case with hyphens: `nvidia-h200.json` for "NVIDIA H200". A GPU without a file uses
that of `DEFAULT`, and a line is logged. Configurations change results only in the last digits, through the order of
sums. INT8 weights also depend on the tile whose largest weight they are rounded against."""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

from qattn_kernels.chip import DEFAULT

log = logging.getLogger(__name__)


class Prefill(NamedTuple):
    """Launch configuration of a prefill.

    Attributes:
        bn: slots per tile without position checks.
        tail: slots per tile with position checks.
        warps: warps per 64 queries of a program.
        stages: tiles in flight.
        queries: queries per program, unless their shared scale decides.
        kib: minimum KiB of shared memory per program for which the configuration pays, 0 for any.
    """

    bn: int
    tail: int
    warps: int
    stages: int
    queries: int = 64
    kib: int = 0


class Decode(NamedTuple):
    """How many programs share a row's context in a decode (split-KV).

    Attributes:
        least: minimum blocks per program: with fewer, its startup and its part of the merge cost more than it saves.
        long: tokens per program from which twice the programs take part; half that number if all programs have room.
        most: maximum programs per row and head that are worth their merge, if each has fewer tokens than `long`.
        most_long: the same if each has more.
        whole: fraction of a wave's places that programs should fill.
    """

    least: int
    long: int
    most: int
    most_long: int
    whole: float


class Tuned(NamedTuple):
    """Measurements on one GPU.

    Attributes:
        gpu: name from `torch.cuda.get_device_name`.
        decode: configuration of all decode calls.
        prefill: configurations by kind and head dimension. The kind is the dtype of the product with values ("int8",
            "fp8", "half", "float"). The dimension is the larger one of K and V, rounded up to a power of two from 64
            on. The best configuration comes first, then smaller ones (`launch.tiles`).
    """

    gpu: str
    decode: Decode
    prefill: dict[tuple[str, int], tuple[Prefill, ...]]


def read(gpu: str) -> Tuned | None:
    """Return the table of a GPU by its name, or None."""
    file = resources.files(__name__) / f"{gpu.lower().replace(' ', '-')}.json"
    if not file.is_file():
        return None
    table = json.loads(file.read_text(encoding="utf-8"))
    prefill = {
        (kind, int(dim)): tuple(Prefill(**config) for config in configs)
        for kind, dims in table["prefill"].items()
        for dim, configs in dims.items()
    }
    return Tuned(table["gpu"], Decode(**table["decode"]), prefill)


@lru_cache
def tuned_for(gpu: str) -> Tuned:
    """Return the table of a GPU, or of `DEFAULT` if the GPU has none. The fallback is logged once."""
    found = read(gpu)
    if found is None:
        log.warning("no launch configurations were measured on %s: using those for %s", gpu, DEFAULT)
        found = read(DEFAULT)
        assert found is not None
    return found
