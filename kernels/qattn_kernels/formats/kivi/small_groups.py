"""KIVI's products for groups smaller than a head: a decode reads several such blocks as one tile.

A loop iteration over 32 tokens takes about as long as one over 128, so `C.TILE` blocks share an iteration. Each block
of keys gets queries multiplied by its scales, and each group of channels of values its own weights. The product with
the keys' zero points runs in fp16, with queries as pairs of fp16 numbers, exact to 22 bits."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats.packing import part_units, unpack_parts
from qattn_kernels.jit.math import TINY, inverse_of
from qattn_kernels.jit.split_int8 import SPLIT_TOP, dot_split, join_split, split_neighbours
from qattn_kernels.jit.tile_order import stack, strided


@triton.jit
def _halves(x):
    """Return both halves `[n / 2, D]` of the rows of `[n, D]`, each number in the thread of its partner."""
    return tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))


@triton.jit
def write_strided(codes, code, at, BITS: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Pack codes `[BLOCK, D]` of a block of values in the order of `KiviFormat.strided`.

    Tokens that share a byte are neighbours in different warps, so bytes move between warps. A sum over parts, as in
    `write_codes`, made racecheck report two writes to one address after this permutation (Triton 3.6)."""
    ROWS: tl.constexpr = C.BLOCK * BITS // 8
    low, high = _halves(strided(code.to(tl.uint8)))
    if BITS == 2:
        first, second = _halves(low)
        third, fourth = _halves(high)
        low, high = first | (second << 2), third | (fourth << 2)
    d, byte = tl.arange(0, SIDE.DP)[None, :], tl.arange(0, ROWS)[:, None]
    tl.store(
        codes + at * (ROWS * SIDE.D) + d * ROWS + byte, (low | (high << 4)).to(codes.dtype.element_ty, bitcast=True)
    )


@triton.jit
def _of_four(tile, INDEX: tl.constexpr):
    """Return row `INDEX` of two or four rows `[rows, n]`: `[1, n]`."""
    one, other = _halves(tile)
    if tile.shape[0] == 2:
        return other if INDEX == 1 else one
    else:
        return _of_four(other if INDEX >= 2 else one, INDEX % 2)


@triton.jit
def largest_query(scaled, scale):
    """Return fp32 `[Q]`, the largest magnitude of each query `[DP, Q]` times its channel scales `[DP]`."""
    size = tl.max(tl.abs(scaled * scale[:, None]).to(tl.int32, bitcast=True), 0)  # comparing bits is cheaper
    return tl.maximum(size.to(tl.float32, bitcast=True), TINY)


@triton.jit
def _block_scores(
    S,
    at,
    scale,
    zero_point_sums,
    unit,
    up,
    INDEX: tl.constexpr,
    BITS: tl.constexpr,
    SIDE: tl.constexpr,
    C: tl.constexpr,
):
    """Return scores `[BLOCK, Q]` of block `INDEX` of a tile, at index `at`, in token order."""
    ROWS: tl.constexpr = C.BLOCK * BITS // 8
    d, byte = tl.arange(0, SIDE.DP)[None, :], tl.arange(0, ROWS)[:, None]
    code = unpack_parts(tl.load(S.codes + at * (ROWS * SIDE.D) + byte * SIDE.D + d), BITS, SIDE, C)
    sums = join_split(dot_split(code, split_neighbours(unit * scale[:, None], C)))
    return sums * (part_units(C.BLOCK, BITS)[:, None] * up[None, :]) + _of_four(zero_point_sums, INDEX)


@triton.jit
def tile_scores(S, at, query, SIDE: tl.constexpr, C: tl.constexpr):
    """Return the scores of a tile: a tuple of `[BLOCK, Q]`, each in token order.

    Queries times block scales share one unit, in which the largest product has `SPLIT_TOP`."""
    TILE: tl.constexpr = C.TILE
    d = tl.arange(0, SIDE.DP)
    high = query.normalized.to(tl.float16)
    low = (query.normalized - high.to(tl.float32)).to(tl.float16)
    zero_point = tl.load(S.zero_point + at.codes[:, None] * SIDE.D + d[None, :])
    sums = tl.dot(zero_point, tl.reshape(tl.join(high, low), (SIDE.DP, 2 * C.Q)))
    sums = tl.sum(tl.reshape(sums, (TILE, C.Q, 2)), 2) * query.scale[None, :]
    scales, scores, largest = (), (), tl.full([SIDE.DP], 0.0, tl.float32)
    for i in tl.static_range(TILE):
        scale = tl.load(S.scale + at.block[i] * SIDE.D + d).to(tl.float32)
        scales += (scale,)
        largest = tl.maximum(largest, scale)
    top = largest_query(query.scaled, largest)
    unit, up = query.scaled * (inverse_of(top) * SPLIT_TOP)[None, :], top * (1.0 / 127.0)
    for i in tl.static_range(TILE):
        scores += (_block_scores(S, at.block[i], scales[i], sums, unit, up, i, at.BITS, SIDE, C),)
    return scores


@triton.jit
def _packed_order(x, C: tl.constexpr):
    """Reorder weights `[TILE * BLOCK, Q]` from `join_blocks` to the code order of `_group_values`.

    That order is parts, then fours of bytes, then blocks. A thread then holds consecutive rows."""
    x = tl.reshape(x, (C.BLOCK // 32, 4, C.TILE, 8, x.shape[1]))
    x = tl.reshape(tl.permute(x, (2, 0, 3, 1, 4)), (C.TILE, C.BLOCK // 4, 4, x.shape[4]))
    return tl.reshape(tl.permute(x, (1, 0, 2, 3)), (C.TILE * C.BLOCK, x.shape[3]))


@triton.jit
def _of_tokens(x, at, GROUP: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Return scales or zero points `x` of one channel group for a tile's tokens, in `_packed_order`: fp32
    `[tokens, 1]`."""
    t = (at * SIDE.D)[:, None] + (GROUP * C.BLOCK + tl.arange(0, C.BLOCK))[None, :]
    x = tl.permute(tl.reshape(tl.load(x + t), (C.TILE, C.BLOCK // 32, 4, 8)), (1, 3, 0, 2))
    return tl.reshape(x, (C.TILE * C.BLOCK,)).to(tl.float32)[:, None]


@triton.jit
def _group_values(S, at, p, unit, top, GROUP: tl.constexpr, BITS: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Return sums `[BLOCK, Q]` of the values of one channel group, weighted by `p`.

    `unit` is `p` relative to the largest weight `top`, for INT8 pairs."""
    ROWS: tl.constexpr = C.BLOCK * BITS // 8
    SIZE: tl.constexpr = ROWS * C.BLOCK  # consecutive bytes of one group of a block
    x = tl.load(S.codes + (at * (ROWS * SIDE.D))[:, None] + (GROUP * SIZE + tl.arange(0, SIZE))[None, :])
    x = tl.permute(tl.reshape(x, (C.TILE, C.BLOCK, ROWS // 4, 4)), (1, 2, 0, 3))
    codes = unpack_parts(tl.reshape(x, (C.BLOCK, C.TILE * ROWS)), BITS, SIDE, C)
    weights = split_neighbours(unit * _of_tokens(S.scale, at, GROUP, SIDE, C), C)
    sums = join_split(dot_split(codes, weights)) * (top * (1.0 / 127.0))[None, :]
    return sums + tl.sum(p * _of_tokens(S.zero_point, at, GROUP, SIDE, C), 0)[None, :]


@triton.jit
def tile_values(S, at, p, BITS: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Return sums `[DP, Q]` of the values of blocks `at` `[TILE]`, weighted by `p`.

    `p` `[TILE * BLOCK, Q]` is in `join_blocks` order. Weights of all channel groups share one unit, in which the
    largest has `SPLIT_TOP`. A group with small weights has the same absolute error as the largest."""
    FOUR: tl.constexpr = SIDE.D // C.BLOCK == 4
    p = _packed_order(p, C)
    largest = tl.maximum(_of_tokens(S.scale, at, 0, SIDE, C), _of_tokens(S.scale, at, 1, SIDE, C))
    if FOUR:
        others = tl.maximum(_of_tokens(S.scale, at, 2, SIDE, C), _of_tokens(S.scale, at, 3, SIDE, C))
        largest = tl.maximum(largest, others)
    top = tl.maximum(tl.max(p * largest, 0), TINY)
    unit = p * (part_units(C.TILE * C.BLOCK, BITS)[:, None] * (inverse_of(top) * SPLIT_TOP)[None, :])
    o = stack(
        _group_values(S, at, p, unit, top, 0, BITS, SIDE, C), _group_values(S, at, p, unit, top, 1, BITS, SIDE, C)
    )
    if FOUR:
        other = stack(
            _group_values(S, at, p, unit, top, 2, BITS, SIDE, C), _group_values(S, at, p, unit, top, 3, BITS, SIDE, C)
        )
        o = stack(o, other)
    return o
