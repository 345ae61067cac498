"""Launch configurations of the decode, by the sizes of a call; never by its capacity: results must not depend on it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from qattn_kernels.launch.constants import LEAST_COLUMNS, Sizes
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import layer_tensors
from qattn_kernels.layout import Geometry

LEAST = 2  # blocks of a program: for less its own start and its share of the merge cost more than it saves
LONG = 2048  # tokens of a program from which twice as many programs take part
MOST = 64  # programs of a row and head that are worth their merge, where each has fewer tokens
MOST_LONG = 128  # and where each has more
WHOLE = 0.8  # of the places that a wave of programs should take
REGISTERS = 65536  # of a multiprocessor: every GPU since Volta
OWN_REGISTERS = 256  # of a thread: what most kernels are compiled to
FEW_REGISTERS = 168  # where both sides are FlashQ of 4 bits, or in the model's precision
OWN_SHARED = 2048  # bytes of a program beside its tiles


class Chip(NamedTuple):
    """What differs between GPUs in how many programs they run at once: multiprocessors, and the bytes of shared memory
    that each of them has."""

    multiprocessors: int
    shared: int


H200 = Chip(132, 233472)  # stands for the interpreter, too


class Launch(NamedTuple):
    """How a decode is launched.

    Attributes:
        plan: how many programs share the packed context of a row and head, by its own length: see `blocks_per_split`.
        warps, stages: of each program: its warps, its loads in flight.
    """

    plan: tuple[int, int, int, int]
    warps: int
    stages: int


@lru_cache
def chip_of(device: torch.device) -> Chip:
    """The GPU that `device` is."""
    if device.type != "cuda":
        return H200
    found = torch.cuda.get_device_properties(device)
    return Chip(found.multi_processor_count, found.shared_memory_per_multiprocessor)


@lru_cache(maxsize=1024)
def choose(size: Sizes, spec: LayerSpec, dtype: torch.dtype, rows: int, chip: Chip) -> Launch:
    """For `rows` rows of queries a KV head and a ring or values of `dtype`."""
    wide = size.DP > 128 and max(size.K_CHANNELS, size.V_CHANNELS) > 0  # too many for one warp's registers
    warps, stages = 1, 3
    if spec.v.in_model_precision:
        warps, stages = 2, 2
    elif size.N > LEAST_COLUMNS or wide:
        # four warps would take Hopper's wgmma, whose 8-bit form wants weights in an order that Triton 3.6 does not give
        warps = 2
    places = chip.multiprocessors * _programs(size, spec, dtype, warps, stages, chip)
    return Launch(plan(places, rows * size.H, size.BLOCK, size.OPEN), warps, stages)


def plan(places: int, heads: int, block: int, open_programs: int) -> tuple[int, int, int, int]:
    """How many programs share the context of each of `heads` rows and KV heads, if `places` run at once: see
    `kernel.blocks_per_split`. Each of them has `open_programs` more for what is not in blocks.

    Whole waves: a last one that is nearly empty takes as long as a full one. One wave, or the fewest that take most
    places; twice as many programs for a long context, where one would have so much to do that others wait for it. For
    few rows and heads no more than are worth their merge, and one wave with those of open tokens.
    """
    waves = next((w for w in range(1, 4) if w * places // heads * heads >= WHOLE * w * places), 3)
    few = max(1, waves * places // heads)
    if few > MOST:
        return MOST, max(MOST, min(MOST_LONG, few - open_programs)), LONG // block, LEAST
    return few, 2 * few, LONG // block, LEAST


def _programs(size: Sizes, spec: LayerSpec, dtype: torch.dtype, warps: int, stages: int, chip: Chip) -> int:
    """How many programs a multiprocessor runs at once: as many as have registers, and room for their tiles of keys and
    values, of which each has one for every load in flight."""
    tensors = layer_tensors(Geometry(1, size.H, size.D, size.D, 1, dtype), spec).items()
    tile = sum(x.nbytes() for name, x in tensors if name[:2] in ("k.", "v.") and x.block_dim is not None) // size.H
    few = spec.v.in_model_precision or (size.ENTRIES == 0 and all(x.few_registers(size.H) for x in (spec.k, spec.v)))
    registers = 32 * warps * (FEW_REGISTERS if few else OWN_REGISTERS)
    return max(1, min(REGISTERS // registers, chip.shared // ((stages - 1) * tile + OWN_SHARED)))
