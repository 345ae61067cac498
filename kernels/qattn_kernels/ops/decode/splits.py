"""How programs of a decode share a row's context, and the partial results that they store (split-KV)."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.head_bits import number
from qattn_kernels.launch import constants
from qattn_kernels.ops.decode.open_tokens import split_used
from qattn_kernels.ops.decode.table import Shares

WHOLE = tl.constexpr(constants.WHOLE)


@triton.jit
def blocks_seen(row, NB, C: tl.constexpr):
    """Return the number of arena blocks that some query of the call reads, capped at the capacity `NB`."""
    if C.RING == 0:
        blocks = row.closed + tl.cdiv(row.length + row.count - row.open_start, C.BLOCK)
    elif C.ONE_TOKEN and C.SPAN == C.BLOCK and C.RESIDUAL == 0:
        blocks = row.closed  # this call still reads a block that it closes from the ring
    else:
        blocks = row.closed + row.closing
    return tl.minimum(blocks, NB)


@triton.jit
def read_shares(SHARES):
    """Return the `table.Shares` that `table.encoded` encoded."""
    few, many, long, least, open, large, part = SHARES
    return Shares(number(few), number(many), number(long), number(least), number(open), number(large), number(part))


class Cut(NamedTuple):
    """How a row's packed blocks are cut into splits.

    Attributes:
        large: number of large splits. They come first.
        much, little: blocks of a large split and of another, multiples of `C.TILE`.
        number: splits that have blocks.
    """

    large: Any
    much: Any
    little: Any
    number: Any


@triton.jit
def cut_blocks(blocks, splits, shares, C: tl.constexpr):
    """Return the `Cut` of a row of `blocks` blocks.

    `splits`: splits of the launch, including splits of open tokens. `shares`: the `table.Shares`. The result ignores
    the capacity, so that sums do not depend on it."""
    short = blocks < shares.few * shares.long
    sharing = tl.minimum(tl.where(short, shares.few, shares.many), splits - shares.open)
    large, much = tl.where(short, 0, shares.large), blocks * shares.part // WHOLE // C.TILE * C.TILE
    rest = blocks - large * much
    each = tl.maximum(tl.cdiv(rest, tl.maximum(sharing - large, 1)), shares.least)
    little = tl.cdiv(each, C.TILE) * C.TILE
    return Cut(large, much, little, large + tl.cdiv(rest, little))


@triton.jit
def split_range(split, splits, row, NB, shares, C: tl.constexpr):
    """Return the block range of a split: `(blocks, number, begin, end, used)`.

    `blocks` is the number of packed blocks that some query reads, `number` the number of splits that share them. `used`
    tells whether the split can hold a token. The first `shares.open` splits read open tokens instead of blocks."""
    blocks = blocks_seen(row, NB, C)
    cut, i = cut_blocks(blocks, splits, shares, C), split - shares.open
    first = i < cut.large
    begin = tl.where(first, i * cut.much, cut.large * cut.much + (i - cut.large) * cut.little)
    end = tl.minimum(begin + tl.where(first, cut.much, cut.little), blocks)
    used = (split < shares.open) | (begin < end)
    if C.RING_PARTS > 1:
        used = used & split_used(split, row, C)
    return blocks, cut.number, begin, end, used


class Results(NamedTuple):
    """Partial results of all splits, and the counters of sparse V.

    Attributes:
        out: fp32 `[B * H, splits, T * G, D]`, sums of weighted values, not yet divided by the sum of the weights.
        stats: fp32 `[B * H, splits, T * G, 2]`, the largest score in log2 units, and the sum of the weights relative to
            it. Sparse V has a third entry, the dropped part of that sum.
        skip_counts: the `SkipCounts` of sparse V, or None.
    """

    out: Any
    stats: Any
    skip_counts: Any


@triton.jit
def store_split(results, bh, split, splits, n, T, real, nonfinite, sums, skips, C: tl.constexpr):
    """Store one split's `Sums` and `Skips` of queries `n` to `results`.

    `T`: tokens of the call. `real`: bool `[Q]`, columns with a token. Queries marked in `nonfinite` get NaN."""
    SIDE: tl.constexpr = C.V
    STAT: tl.constexpr = 3 if C.SPARSE_V else 2
    acc = tl.where(nonfinite[None, :], float("nan"), sums.acc)
    d, inside = tl.arange(0, SIDE.DP), n < T * C.G
    at = (bh.to(tl.int64) * splits + split) * (T * C.G) + n
    tl.store(results.out + at[None, :] * SIDE.D + d[:, None], acc, mask=inside[None, :] & (d < SIDE.D)[:, None])
    tl.store(results.stats + at * STAT, sums.m, mask=inside)
    tl.store(results.stats + at * STAT + 1, sums.l, mask=inside)
    if C.SPARSE_V:
        tl.store(results.stats + at * STAT + 2, skips.lost, mask=inside)
        tl.atomic_add(results.skip_counts.read + bh, tl.sum(tl.where(real, skips.read, 0), 0).to(tl.int64))
        tl.atomic_add(results.skip_counts.skipped + bh, tl.sum(tl.where(real, skips.skipped, 0), 0).to(tl.int64))
