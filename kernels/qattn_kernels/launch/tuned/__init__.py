"""Launch configurations as they were measured, a JSON file for each GPU.

A file is named as the GPU is, in small letters with hyphens: `nvidia-h200.json` for "NVIDIA H200". A GPU without a file
gets that of `DEFAULT`, and a line is logged. Results do not depend on them, but for the last digits, by the order of
sums, and where weights are rounded to INT8 by the tile against whose largest weight they are.
"""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

from qattn_kernels.chip import DEFAULT

log = logging.getLogger(__name__)


class Prefill(NamedTuple):
    """How a prefill is launched.

    Attributes:
        bn: slots of a tile where no position is compared.
        tail: slots of a tile where some are.
        warps: of a program, for each 64 of its queries.
        stages: tiles in flight.
        queries: of a program, unless their scale says.
        kib: of shared memory that a program must be able to have, if the configuration pays on such GPUs alone.
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
        least: blocks of a program: for less its own start and its share of the merge cost more than it saves.
        long: tokens of a program from which twice as many programs take part; half as many where there is room for all.
        most: programs of a row and head that are worth their merge, where each has fewer tokens.
        most_long: the same where each has more.
        whole: of the places that a wave of programs should take, a fraction.
    """

    least: int
    long: int
    most: int
    most_long: int
    whole: float


class Tuned(NamedTuple):
    """What was measured on one GPU.

    Attributes:
        gpu: its name, as `torch.cuda.get_device_name` has it.
        decode: for all calls.
        prefill: by the dtype of the product with values ("int8", "fp8", "half", "float"), and the power of two from 64
            on that holds the larger head dim; the best first, then those that take less shared memory
            (`launch.tiles`).
    """

    gpu: str
    decode: Decode
    prefill: dict[tuple[str, int], tuple[Prefill, ...]]


def read(gpu: str) -> Tuned | None:
    """The table of a GPU by its name; None if there is none."""
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
    """The table of a GPU, or that of `DEFAULT`, which is logged once."""
    found = read(gpu)
    if found is None:
        log.warning("launch configurations were not measured on %s: those of %s are used", gpu, DEFAULT)
        found = read(DEFAULT)
        assert found is not None
    return found
