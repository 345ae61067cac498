"""Compile-time constants of kernels, bundled in one hashable value to keep argument lists short."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, NamedTuple

from qattn_kernels.formats.side import PARTS, Side
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import WIDEST_HEAD

LEAST_COLUMNS = 8  # minimum columns of a tensor core tile
MOST_COLUMNS = 16  # maximum columns per program; more queries of a short call use more programs
LATENT_COLUMNS = (16, 64)  # the same for latent attention: query heads share each latent that a program dequantizes
RING_TILE = 64  # ring slots that a decode reads at a time
SINK_TILE = 32  # sink table entries at a time, one bit each in a word
WHOLE = 4096  # parts of a context, in which `table.Shares.part` counts
UNIT = 1 << 28  # reciprocals of numbers of splits count in 1 / `UNIT`
WIDEST_TILE = 128  # slots of a prefill's largest tile, which may reach this far past a row's last token
FACTORS_STEP = 2048  # slots whose value factors are computed at a time
WHOLE_RING = 128  # maximum slots for one program: usually only one tile is open, except in steps that close a block


class Rotation(NamedTuple):
    """The rotation of a side (`ops/rotate/reference.py`), for kernels that rotate tokens themselves.

    Attributes:
        SIGNS: one bit per channel, set where its sign changes.
        SIZE: channels that are rotated together.
        STAGES: stages of their transform.
        UNIT: factor that makes the transform orthonormal.
    """

    SIGNS: int
    SIZE: int
    STAGES: int
    UNIT: float


class Sizes(NamedTuple):
    """Compile-time constants of the append, decode and sink pool kernels.

    Fields that `PrefillSizes` has too have the same names there.

    Heads:
        H: KV heads. G: query heads per KV head.
        K, V: the `Side` of keys and of values.
    Window (`layout.Window`):
        BLOCK: tokens per block. SPAN, RESIDUAL: as in `Window`. RING: slots; 0 if tokens are packed as they arrive.
    Tiles:
        PARTS: parts of a packed block, which are interleaved in a tile of scores (`jit/tile_order.py`).
        FOURS: a thread holds four neighbours of each part, which it writes as one word.
        TILE: blocks that a decode reads at a time.
    Sink pool:
        ENTRIES: entries of its table, 0 without a pool. SINKS: sinks in the pool. EVICTED: size of the evicted window.
        CROP_BLOCKS: blocks that a crop can reopen.
    Decode:
        OPEN: splits that read open tokens (ring parts and sinks). RING_PARTS: ring parts among them.
        Q: queries per program. N: columns of their product, `2 Q` for INT8 pairs.
        ONE_TOKEN: the call has one token. Q_LEVELS: largest code of a query.
        SAS, SOFTCAP, LOCAL, SPARSE_V: use the SAS softmax, a score cap, a local window, sparse V.
        CHUNKS: the window is the query's chunk.
    PAGED: blocks of all rows are in one page pool, located by a table.
    PLAIN: run in the interpreter, which has no assembly.
    SHIFTS_FP8: FP8 bytes become numbers by shifts, because the GPU has no instruction for it.
    DEPENDENT: kernels of a step are launched before the previous one has ended, and wait (`jit/dependent.py`).
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
    SHIFTS_FP8: bool = False
    DEPENDENT: bool = False


class PrefillSizes(NamedTuple):
    """Compile-time constants of the prefill kernel.

    Heads and dims:
        HQ: query heads. G: query heads per KV head. D, DV: head dims of K and V. DP, DVP: the next powers of two.
    Tiles:
        BM: queries per program. BN: slots per tile of the main loop. TAIL: slots per other tile. STAGES: of pipelines.
    Unpacked keys and values:
        BLOCK: slots per block. BLOCK_SCALES: slots of a closed block share scales; groups of keys do with FP8 values.
        K_INT8, V_INT8: unpacked keys, values are INT8, and so are their products. V_FP8: values are FP8.
    Products:
        Q_LEVELS: largest code of a query. Q_GROUP: queries that share a scale (`granularity`), `block`: a program's.
        BY_ROW: scores stay in the unit of their query (`row_weights`). RAISED: INT8 weights are then rounded at once.
    Subtracted means:
        SMOOTH_K: mean of keys. SMOOTH_Q: which mean of queries (`smooth_q`). SMOOTH_V: mean of values.
    Scores:
        SAS, SOFTCAP: use the SAS softmax, a score cap. LOCAL_WINDOW: positions that a query sees back, 0 for all.
        CHUNKS: a query sees back to a multiple of `LOCAL_WINDOW` positions.
        SINK_LOGITS: the model has learned sinks.
    PLAIN: run in the interpreter, which has no assembly.
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
    """Return the smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def _tile(spec: LayerSpec, k: Side, v: Side) -> dict[str, Any]:
    """Return the constants of a decode's tiles and of their token order."""
    block = spec.window.block
    alone = spec.latent or spec.sparsity.tau > 0  # sparse V judges blocks one by one
    # for latents and strided values, choose parts such that blocks have ascending tokens
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
    """Return the constants of a call of `tokens` new tokens.

    Args:
        spec: the layer's formats and arithmetic.
        heads, group, dim: KV heads, query heads per KV head, head dimension.
        tokens: new tokens.
        int8: products use INT8 pairs of queries.
        cap: scores are capped.
        local: the layer has a local window.
        chunks: that window is a chunk.
        v_dim: head dimension of values, if not `dim`.
    """
    at = spec.window
    k, v = spec.k.side(heads, dim, at.block, False), spec.v.side(heads, v_dim or dim, at.block, True)
    # two warps hold the sums of a wide head for the fewest columns
    narrow = max(dim, v_dim or dim) > WIDEST_HEAD
    least, most = LATENT_COLUMNS if spec.latent else (LEAST_COLUMNS, LEAST_COLUMNS if narrow else MOST_COLUMNS)
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
