"""Launch configurations of the decode, by the sizes of a call; never by its capacity: results must not depend on it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from qattn_kernels.chip import Chip
from qattn_kernels.launch.constants import Sizes
from qattn_kernels.launch.tuned import Decode, tuned_for
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import layer_tensors
from qattn_kernels.layout import Geometry

REGISTERS = 65536  # of a multiprocessor: every GPU since Volta
OWN_REGISTERS = 256  # of a thread: what most kernels are compiled to
MODEL_REGISTERS = 168  # where values are in the model's precision
MOST_REGISTERS = 255  # of a thread on any GPU
# Channels that one warp holds. Two wait for one another several times a block, and took up to twice as long on an H100
# with 16 columns and 32k tokens, where unpacking is most of the work.
ONE_WARP_DIM = 128
# Of shared memory, for tiles in flight. On an H200 three loads of 12 KiB took 5 % longer than two, of 16 to 32 KiB
# up to 10 % in 16 rows; in one row they were 2 % faster.
MOST_SHARED = 0.75
OWN_SHARED = 2048  # bytes of a program beside its tiles, as a rule
MOST_OWN_SHARED = 16 * 1024  # in any kernel: what passes between threads, and its queries


class Launch(NamedTuple):
    """How a decode is launched.

    Attributes:
        plan: how many programs share the packed context of a row and head, by its own length: see `blocks_per_split`.
        warps, stages: of each program: its warps, its loads in flight.
        registers: of a thread at most, if the compiler is told.
    """

    plan: tuple[int, int, int, int]
    warps: int
    stages: int
    registers: int | None


@lru_cache(maxsize=1024)
def choose(size: Sizes, spec: LayerSpec, dtype: torch.dtype, rows: int, chip: Chip) -> Launch:
    """For `rows` rows of queries a KV head and a ring or values of `dtype`."""
    warps, stages = 1, 3
    if spec.v.in_model_precision:
        warps, stages = 2, 2
    elif size.K.DP > ONE_WARP_DIM:
        # four warps would take Hopper's wgmma, whose 8-bit form wants weights in an order that Triton 3.6 does not give
        warps = 2
    warps = max(warps, *(fmt.core.decode_warps(size.K.D, size.BLOCK, size.N) for fmt in (spec.k, spec.v)))
    registers = 32 * warps * (MODEL_REGISTERS if spec.v.in_model_precision else OWN_REGISTERS)
    programs = REGISTERS // registers  # of a multiprocessor, as far as registers go
    tile = _tile_bytes(size, spec, dtype)
    if warps > 2 or 3 in (size.K.BITS, size.V.BITS):
        stages = 2  # with three, shared memory would hold half as many programs
    elif 2 * tile * programs > MOST_SHARED * chip.shared:
        stages = 2  # whatever the rows: another kernel would be compiled for some of them
    if (stages - 1) * tile + MOST_OWN_SHARED > chip.block:
        stages = max(1, 1 + (chip.block - MOST_OWN_SHARED) // tile)
    programs = max(1, min(programs, chip.shared // ((stages - 1) * tile + OWN_SHARED)))
    # else the compiler may give these 168, which was 5 % slower at 32k on an H200 than the 226 they take so
    most = MOST_REGISTERS if spec.k.asks_registers(size.H) and spec.v.asks_registers(size.H) else None
    tuned = tuned_for(chip.name).decode
    shares = plan(chip.multiprocessors * programs, rows * size.H, size.BLOCK, size.OPEN, tuned)
    return Launch(shares, warps, stages, most)


def plan(places: int, heads: int, block: int, open_programs: int, tuned: Decode) -> tuple[int, int, int, int]:
    """How many programs share the context of each of `heads` rows and KV heads, if `places` run at once: see
    `kernel.blocks_per_split`. Each of them has `open_programs` more for what is not in blocks.

    Whole waves: a last one that is nearly empty takes as long as a full one. One wave, or the fewest that take most
    places; twice as many programs for a long context, where one would have so much to do that others wait for it. For
    few rows and heads no more than are worth their merge, and one wave with those of open tokens.
    """
    waves = next((w for w in range(1, 4) if w * places // heads * heads >= tuned.whole * w * places), 3)
    few = max(1, waves * places // heads)
    if few > tuned.most:
        many = max(tuned.most, min(tuned.most_long, few - open_programs))
        return tuned.most, many, tuned.long // 2 // block, tuned.least
    return few, 2 * few, tuned.long // block, tuned.least


def _tile_bytes(size: Sizes, spec: LayerSpec, dtype: torch.dtype) -> int:
    """Bytes of the keys and values that a turn of a program reads; it has as much room for every load in flight."""
    tensors = layer_tensors(Geometry(1, size.H, size.K.D, size.V.D, 1, dtype), spec).items()
    blocks = sum(x.nbytes() for name, x in tensors if name[:2] in ("k.", "v.") and x.block_dim is not None)
    return blocks // size.H * size.TILE
