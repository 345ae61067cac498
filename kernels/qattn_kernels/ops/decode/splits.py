"""How programs of a decode share a row's context, and the partial results that they store (split-KV)."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.ops.decode.open_tokens import split_used


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
def blocks_per_split(blocks, splits, shares, C: tl.constexpr):
    """Return the packed blocks per split, a multiple of `C.TILE`, for a row of `blocks` blocks.

    `splits`: splits of the launch, including splits of open tokens. `shares`: the `table.Shares`. The result ignores
    the capacity, so that sums do not depend on it."""
    sharing = tl.minimum(tl.where(blocks < shares.few * shares.long, shares.few, shares.many), splits - shares.open)
    return tl.cdiv(tl.maximum(tl.cdiv(blocks, sharing), shares.least), C.TILE) * C.TILE


@triton.jit
def split_range(split, splits, row, NB, shares, C: tl.constexpr):
    """Return the block range of a split: `(blocks, per_split, begin, end, used)`.

    `blocks` is the number of packed blocks that some query reads, `per_split` the number per split. `used` tells
    whether the split can hold a token. The first `shares.open` splits read open tokens instead of blocks."""
    blocks = blocks_seen(row, NB, C)
    per_split = blocks_per_split(blocks, splits, shares, C)
    begin = (split - shares.open) * per_split
    end = tl.minimum(begin + per_split, blocks)
    used = (split < shares.open) | (begin < end)
    if C.RING_PARTS > 1:
        used = used & split_used(split, row, C)
    return blocks, per_split, begin, end, used


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
