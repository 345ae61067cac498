"""Which tiles a launch gets: the first configuration of a table that a program of the GPU has shared memory for.

A table (`tuned/*.json`) lists configurations for each family of kernels and head dim: the fastest first, then those
that need less memory. Each family has a formula for the bytes that a configuration needs, and the choice comes before
the launch. `tests/kernels/test_other_gpus.py` compiles kernels for other GPUs and compares. A new family adds its lists
to the table and its formula here. The file of another GPU holds what was measured there: the lists of `DEFAULT` follow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from qattn_kernels.chip import DEFAULT, KIB, Chip
from qattn_kernels.launch.constants import PrefillSizes, power_of_two
from qattn_kernels.launch.tuned import Prefill, read, tuned_for

SLOT = 4  # bytes of what a slot has beside its key and value: a bias, a scale, the inverse of one, a position
ALIGNED = KIB  # bytes at most that go to alignment


@lru_cache
def prefill_tiles(chip: Chip, kind: str, dim: int) -> tuple[Prefill, ...]:
    """The configurations of a prefill on a GPU, in the order in which they are tried.

    Args:
        kind: as in `tuned.Tuned.prefill`. dim: the larger head dim of keys and values.
    """
    default, key = read(DEFAULT), (kind, power_of_two(max(dim, 64)))
    assert default is not None
    listed = (*tuned_for(chip.name).prefill.get(key, ()), *default.prefill[key])
    return tuple(dict.fromkeys(one for one in listed if one.kib * KIB <= chip.block))


def first_that_fits(tiles: tuple[Prefill, ...], needs: Callable[[Prefill], int], chip: Chip) -> Prefill:
    """The first of `tiles` whose bytes of shared memory, `needs(tile)`, a program of the GPU can have.

    Raises:
        ValueError: none fits; `layer.support` refuses such layers before.
    """
    found = next((one for one in tiles if needs(one) <= chip.block), None)
    if found is None:
        least = min(map(needs, tiles)) // KIB
        raise ValueError(f"a program needs {least} KiB of shared memory, and this GPU gives it {chip.block // KIB}")
    return found


def prefill_bytes(size: PrefillSizes, width: int, chip: Chip) -> int:
    """Bytes of shared memory, at most, that a program of the prefill kernel takes on a GPU.

    Args:
        width: bytes of a number of the queries, and of keys and values without codes.
    """
    k, v = 1 if size.K_INT8 else width, 1 if size.V_INT8 or size.V_FP8 else width
    queries = size.BM * size.DP * k
    beside = SLOT * (2 + size.K_INT8 + size.V_INT8 + (size.SMOOTH_Q != "none"))

    def loop(slots: int) -> int:
        keys, values = slots * size.DP * k, slots * size.DVP * v
        flying = (size.STAGES - 1) * slots * beside
        if chip.wgmma:  # which reads the tile of a turn where it was loaded to
            return flying + size.STAGES * (keys + values)
        # elsewhere operands go to registers: weights, and what was not in flight, pass through shared memory
        weights = size.BM * slots * v
        return flying + weights + ((size.STAGES - 1) * (keys + values) or max(keys, values))

    return ALIGNED + queries + max(loop(size.BN), loop(size.TAIL))
