"""The constants that a kernel is compiled for, in one hashable value, so that argument lists stay readable."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, NamedTuple

from qattn_kernels.formats.side import PARTS, Side
from qattn_kernels.layer.spec import LayerSpec

LEAST_COLUMNS = 8  # of a tensor core tile
MOST_COLUMNS = 16  # of one program; more queries of a short call go to more programs
LATENT_COLUMNS = (16, 64)  # the same two of latent attention: query heads share each latent that a program dequantizes
RING_TILE = 64  # slots of the ring that a decode reads at a time
SINK_TILE = 32  # entries of the table of sinks at a time, a bit each of a word
WIDEST_TILE = 128  # slots of the largest tile of a prefill, which may touch so many behind a row's last token
FACTORS_STEP = 2048  # slots of values whose factors are worked out at a time
FEW_SPLITS = 8  # of a context, which a merge weighs at once in few threads
WHOLE_RING = 128  # slots at most that one program reads: one tile is open there but for steps that close a block


class Rotation(NamedTuple):
    """The rotation of a side (`ops/rotate/reference.py`), as kernels that rotate tokens themselves are compiled for it.

    Attributes:
        SIGNS: a bit for each channel, set where its sign changes.
        SIZE: channels that are rotated together. STAGES: of their transform. UNIT: makes it orthonormal.
    """

    SIGNS: int
    SIZE: int
    STAGES: int
    UNIT: float


class Sizes(NamedTuple):
    """What the kernels of a packed cache are compiled for: those of the append, the decode and the sink pool.

    Attributes are compile-time constants inside them; what `PrefillSizes` has too has the same name there.

    Heads:
        H: KV heads. G: query heads of each.
        K, V: the `Side` of keys and of values.
    The window (`layout.Window`):
        BLOCK: tokens of a block. SPAN, RESIDUAL: of it. RING: slots; 0 where tokens get their final form at once.
    Tiles:
        PARTS: of a packed block, which are interleaved in a tile of scores (`jit/tile_order.py`).
        FOURS: a thread has four neighbours of each part, which it writes as one word.
        TILE: blocks that a decode reads at a time.
    The sink pool:
        ENTRIES: places of its table, 0 without a pool. SINKS: in the pool. EVICTED: in the window behind it.
        CROP_BLOCKS: blocks that a crop can reopen.
    A decode:
        OPEN: splits that are no packed blocks, but parts of the ring, or sinks. RING_PARTS: of the ring.
        Q: queries of a program. N: their columns in a product, twice as many if they are INT8 pairs.
        ONE_TOKEN: the call has one. Q_LEVELS: largest code of a query.
        SAS, SOFTCAP, LOCAL, SPARSE_V: whether that softmax, a cap of scores, a local window, sparse V is used.
        CHUNKS: the window is the chunk of a query.
    PAGED: blocks of all rows lie in one pool, where a table says.
    PLAIN: the interpreter runs, which knows no assembly.
    """

    H: int
    G: int
    K: Side
    V: Side
    BLOCK: int
    SPAN: int
    RESIDUAL: int
    RING: int
    PARTS: int
    FOURS: bool
    TILE: int
    ENTRIES: int
    SINKS: int
    EVICTED: int
    CROP_BLOCKS: int
    OPEN: int
    RING_PARTS: int
    Q: int
    N: int
    ONE_TOKEN: bool
    Q_LEVELS: int
    SAS: bool
    SOFTCAP: bool
    LOCAL: bool
    CHUNKS: bool
    SPARSE_V: bool
    PAGED: bool
    PLAIN: bool


class PrefillSizes(NamedTuple):
    """What the prefill kernel is compiled for. Attributes are compile-time constants inside it.

    Heads and dims:
        HQ: query heads. G: of each KV head. D, DV: head dims of K and V. DP, DVP: the powers of two that hold them.
    Tiles:
        BM: queries of a program. BN: slots of a tile of the main loop. TAIL: of the others. STAGES: of their pipelines.
    Unpacked keys and values:
        BLOCK: slots of a block. BLOCK_SCALES: the slots of a closed block share scales, in groups of K.
        K_INT8, V_INT8: keys, values are INT8, there and in the product. V_FP8: values are FP8.
    Products:
        Q_LEVELS: largest code of a query. Q_GROUP: which queries share a scale (`groups`; `block` is the program's
            own).
        BY_ROW: scores may stay in units of their query (`row_weights`). RAISED: INT8 weights are rounded at once there.
    Means that were subtracted:
        SMOOTH_K: of keys. SMOOTH_Q: of which queries (`smooth_q`). SMOOTH_V: of values.
    Scores:
        SAS, SOFTCAP: whether that softmax, a cap is used. LOCAL_WINDOW: positions that a query sees back, 0 for all.
        CHUNKS: it sees back to a multiple of so many positions.
        SINK_LOGITS: the model has learned ones.
    PLAIN: the interpreter runs, which knows no assembly.
    """

    HQ: int
    G: int
    D: int
    DV: int
    DP: int
    DVP: int
    BM: int
    BN: int
    TAIL: int
    STAGES: int
    BLOCK: int
    BLOCK_SCALES: bool
    V_FP8: bool
    K_INT8: bool
    V_INT8: bool
    Q_LEVELS: float
    Q_GROUP: str
    BY_ROW: bool
    RAISED: bool
    SMOOTH_K: bool
    SMOOTH_Q: str
    SMOOTH_V: bool
    SAS: bool
    SOFTCAP: bool
    LOCAL_WINDOW: int
    CHUNKS: bool
    SINK_LOGITS: bool
    PLAIN: bool


def power_of_two(n: int) -> int:
    """The least power of two that is not below `n`."""
    return 1 << (n - 1).bit_length()


def _tile(spec: LayerSpec, k: Side, v: Side) -> dict[str, Any]:
    """The constants of the tiles that a decode reads, and of the order of their tokens."""
    block = spec.window.block
    alone = spec.latent or spec.sparsity.tau > 0  # sparse V judges each block
    # of latents, and of strided values, so many that blocks have their tokens in ascending order
    own = [PARTS.get(min(side.WIDTHS), 1) for side in (k, v)]
    parts = block // 8 if spec.latent or v.STRIDED else max(own)
    return {
        "PARTS": parts,
        "FOURS": block // (8 * parts) % 4 == 0,
        "TILE": 1 if alone else min(k.MOST_TILE, v.MOST_TILE),
    }


@lru_cache(maxsize=1024)
def sizes_of(
    spec: LayerSpec,
    heads: int,
    group: int,
    dim: int,
    tokens: int,
    int8: bool,
    cap: bool,
    local: bool,
    chunks: bool = False,
    v_dim: int | None = None,
) -> Sizes:
    """For a call of `tokens` new tokens, with a soft cap, a local window, which may be a chunk, or neither. `v_dim`:
    values', if not `dim`."""
    at = spec.window
    k, v = spec.k.side(heads, dim, at.block, False), spec.v.side(heads, v_dim or dim, at.block, True)
    least, most = LATENT_COLUMNS if spec.latent else (LEAST_COLUMNS, MOST_COLUMNS)
    columns = min(most, max(least, power_of_two(tokens * group) * (1 + int8)))
    ring = at.ring if spec.k.windowed else 0
    ring_parts = ring // RING_TILE if ring > WHOLE_RING else int(ring > 0)
    return Sizes(
        H=heads,
        G=group,
        K=k,
        V=v,
        BLOCK=at.block,
        SPAN=at.span,
        RESIDUAL=at.residual,
        RING=ring,
        **_tile(spec, k, v),
        OPEN=ring_parts + int(spec.sink_pool.num > 0),
        RING_PARTS=ring_parts,
        ENTRIES=spec.sink_pool.entries(at),
        SINKS=spec.sink_pool.num,
        EVICTED=spec.sink_pool.window,
        CROP_BLOCKS=spec.sink_pool.crop_blocks(at),
        Q=columns // 2 if int8 else columns,
        N=columns,
        ONE_TOKEN=tokens == 1,
        Q_LEVELS=spec.compute.decode_levels if int8 else 127,
        SAS=spec.compute.softmax == "sas",
        SOFTCAP=cap,
        LOCAL=local,
        CHUNKS=chunks,
        SPARSE_V=spec.sparsity.tau > 0,
        PAGED=False,
        PLAIN=os.environ.get("TRITON_INTERPRET") == "1",
    )
