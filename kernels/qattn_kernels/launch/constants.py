"""The constants that a kernel is compiled for, in one hashable value, so that argument lists stay readable."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

from qattn_kernels.layer.spec import LayerSpec

LEAST_COLUMNS = 8  # of a tensor core tile
MOST_COLUMNS = 32  # of one program; more queries of a short call go to more programs


class Sizes(NamedTuple):
    """Attributes are compile-time constants inside kernels.

    `H` KV heads, `G` query heads of each, `D` head dim, `DP` the power of two that holds it; `BLOCK`, `SPAN`,
    `RESIDUAL`, `RING` of the window (`RING` 0: tokens get their final form at once); `K_LOW`, `V_LOW` which heads
    have 2 bits (`Low`; how many is no constant, so that layers with other heads need no kernels of their own);
    `K_BITS`, `V_BITS` bits of a code where all heads have as many; `K_CHANNELS`, `V_CHANNELS` how many of a token
    share a scale in formats where not all do, else 0; `PARTS` of a packed block, which take turns in a tile of
    scores, `FOURS` whether a thread has four neighbours of each; `OPEN` parts of a decode that are no packed blocks
    (ring, sinks); `ENTRIES` of the table of sinks (0: there is none), `SINKS` in the pool, `EVICTED` in the window,
    `UNDOABLE` blocks by a crop; `Q` queries of a decode program and their `N` columns, twice as many if they are
    INT8 pairs, `ONE` a call of one token; `INT8` products of integers, `Q_LEVELS` of a query's codes; `SMOOTH`
    keys are coded around a mean, `K_GROUP` which share a scale; `SAS`, `CAP`, `LOCAL`, `SPARSE` whether that
    softmax, a soft cap, a local window, sparse V is used; `PLAIN` the interpreter runs, which knows no assembly.
    """

    H: int
    G: int
    D: int
    DP: int
    BLOCK: int
    SPAN: int
    RESIDUAL: int
    RING: int
    K_LOW: int
    V_LOW: int
    K_BITS: int
    V_BITS: int
    K_CHANNELS: int
    V_CHANNELS: int
    PARTS: int
    FOURS: bool
    OPEN: int
    ENTRIES: int
    SINKS: int
    EVICTED: int
    UNDOABLE: int
    Q: int
    N: int
    ONE: bool
    INT8: bool
    SMOOTH: bool
    K_GROUP: str
    Q_LEVELS: int
    SAS: bool
    CAP: bool
    LOCAL: bool
    SPARSE: bool
    PLAIN: bool


def power_of_two(n: int) -> int:
    """The least power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()


@lru_cache(maxsize=1024)
def sizes_of(
    spec: LayerSpec, heads: int, group: int, dim: int, tokens: int, int8: bool, cap: bool, local: bool
) -> Sizes:
    """For a call of `tokens` new tokens, with a soft cap or a local window or neither."""
    at = spec.window
    columns = min(MOST_COLUMNS, max(LEAST_COLUMNS, power_of_two(tokens * group) * (1 + int8)))
    parts = max(fmt.core.tile_parts(heads) for fmt in (spec.k, spec.v))
    return Sizes(
        H=heads,
        G=group,
        D=dim,
        DP=power_of_two(dim),
        BLOCK=at.block,
        SPAN=at.span,
        RESIDUAL=at.residual,
        RING=at.ring if spec.k.windowed else 0,
        K_LOW=int(spec.k.core.low_kind(heads)),
        V_LOW=int(spec.v.core.low_kind(heads)),
        K_BITS=spec.k.core.kernel_bits(heads),
        V_BITS=spec.v.core.kernel_bits(heads),
        K_CHANNELS=spec.k.channel_group(dim),
        V_CHANNELS=spec.v.channel_group(dim),
        PARTS=parts,
        FOURS=at.block // (8 * parts) % 4 == 0,
        OPEN=int(spec.k.windowed) + int(spec.sink_pool.num > 0),
        ENTRIES=spec.sink_pool.entries(at),
        SINKS=spec.sink_pool.num,
        EVICTED=spec.sink_pool.window,
        UNDOABLE=spec.sink_pool.undoable(at),
        Q=columns // 2 if int8 else columns,
        N=columns,
        ONE=tokens == 1,
        INT8=int8,
        SMOOTH=spec.k.smoothed,
        K_GROUP=spec.k.core.scale_group,
        Q_LEVELS=spec.compute.decode_levels if int8 else 127,
        SAS=spec.compute.softmax == "sas",
        CAP=cap,
        LOCAL=local,
        SPARSE=spec.sparsity.tau > 0,
        PLAIN=os.environ.get("TRITON_INTERPRET") == "1",
    )
