"""Choose tiles: the first configuration of a table whose shared memory fits the GPU.

A table (`tuned/*.json`) lists configurations per kernel family and head dimension: the fastest first, then smaller
ones. Each family has a formula for the bytes of a configuration, so the choice precedes the launch.
`tests/kernels/test_other_gpus.py` compares the formula with kernels compiled for other GPUs.

To add a family, add its lists to the table and its formula here. The file of another GPU holds its own measurements,
followed by the lists of `DEFAULT`."""

from __future__ import annotations

from collections.abc import Callable

from qattn_kernels.chip import DEFAULT, KIB, Chip
from qattn_kernels.launch.constants import PrefillSizes, power_of_two
from qattn_kernels.launch.tuned import Prefill, read, tuned_for

SLOT = 4  # bytes of each extra number of a slot: bias, scale, inverse scale, position
ALIGNED = KIB  # maximum bytes lost to alignment


def prefill_tiles(chip: Chip, kind: str, dim: int) -> tuple[Prefill, ...]:
    """Return the prefill configurations for a GPU, in the order to try.

    Args:
        chip: the GPU.
        kind: as in `tuned.Tuned.prefill`.
        dim: the larger head dimension of keys and values.
    """
    default, key = read(DEFAULT), (kind, power_of_two(max(dim, 64)))
    assert default is not None
    listed = (*tuned_for(chip).prefill.get(key, ()), *default.prefill[key])
    return tuple(dict.fromkeys(one for one in listed if one.kib * KIB <= chip.block))


def first_that_fits(tiles: tuple[Prefill, ...], needs: Callable[[Prefill], int], chip: Chip) -> Prefill:
    """Return the first of `tiles` whose shared memory `needs(tile)`, in bytes, fits a program of the GPU.

    Raises:
        ValueError: if none fits; `layer.support` refuses such layers earlier.
    """
    found = next((one for one in tiles if needs(one) <= chip.block), None)
    if found is None:
        least = min(map(needs, tiles)) // KIB
        raise ValueError(f"a program needs {least} KiB of shared memory, and this GPU gives it {chip.block // KIB}")
    return found


def prefill_bytes(size: PrefillSizes, width: int, chip: Chip) -> int:
    """Return an upper bound of the shared memory, in bytes, of a prefill program.

    Args:
        size: compile-time constants of the kernel.
        width: bytes of a number of queries, and of unquantized keys and values.
        chip: the GPU.
    """
    k, v = 1 if size.K_INT8 else width, 1 if size.V_INT8 or size.V_FP8 else width
    queries = size.BM * size.DP * k
    slot_bytes = SLOT * (2 + size.K_INT8 + size.V_INT8 + (size.SMOOTH_Q != "none"))

    def loop(slots: int) -> int:
        keys, values = slots * size.DP * k, slots * size.DVP * v
        flying = (size.STAGES - 1) * slots * slot_bytes
        if chip.wgmma:  # wgmma reads a tile where it was loaded
            return flying + size.STAGES * (keys + values)
        # Other GPUs read operands from registers. Weights, and operands that were not in flight, pass through shared
        # memory.
        weights = size.BM * slots * v
        return flying + weights + ((size.STAGES - 1) * (keys + values) or max(keys, values))

    return ALIGNED + queries + max(loop(size.BN), loop(size.TAIL))
