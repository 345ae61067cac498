"""Softmax weights of a tile of scores, and the skip rule of sparse V. Queries are columns, scores are in log2 units."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.jit.math import LOG2E, NOTHING, exp2_sas


@triton.jit
def soft_cap(s, cap):
    """Cap scores `s` (log2 units) at `cap` (the model's units): `cap * LOG2E * tanh(s / LOG2E / cap)`."""
    x = tl.exp2(-2.0 * tl.abs(s) / cap)
    t = cap * LOG2E * (1.0 - x) / (1.0 + x)
    return tl.where(s < 0, -t, t)


@triton.jit
def weights(s, top, running, threshold, C: tl.constexpr):
    """Return exponentials of scores `s` relative to the tile's maximum `top` `[Q]`. SAS sets weights to 0 that are
    `threshold` below the `running` maximum `[Q]`."""
    x = s - top[None, :]
    if C.SAS:
        return exp2_sas(x, (threshold + running - top)[None, :])
    return tl.exp2(x)


@triton.jit
def weigh(s, m, threshold, C: tl.constexpr):
    """Return `(weights, alpha, beta, running)` of a tile of scores `s` `[n, Q]`, with `m` `[Q]` the maximum so far.

    `weights` are relative to the tile's own maximum. `alpha` rescales the older sums and `beta` the tile's sums to the
    new maximum `running`."""
    top = tl.max(s, 0)
    running = tl.maximum(m, top)
    return weights(s, top, running, threshold, C), tl.exp2(m - running), tl.exp2(top - running), running


@triton.jit
def count_visible(s):
    """Return int32 `[Q]`, the number of tokens of a tile that each query sees."""
    return tl.sum((s > NOTHING).to(tl.int32), 0)


@triton.jit
def known_mass(s, threshold, C: tl.constexpr):
    """Return the sum of a tile's weights in log2, fp32 `[Q]`."""
    top = tl.max(s, 0)
    return tl.where(top > NOTHING, top + tl.log2(tl.sum(weights(s, top, top, threshold, C), 0)), NOTHING)


@triton.jit
def may_skip(p, m, beta, l, lost, known, own, limits):
    """Return whether every query can skip the values of a tile.

    `beta` over the row sum only falls as more keys arrive, so no weight above tau is dropped. The budget applies to
    what the part read itself, plus its `share` of the known mass. Together the parts cover the whole row sum. Columns
    without a query do not count. Queries that have seen nothing yet do not count either, because their `l` and `lost`
    are discarded.

    Args:
        p: int32 `[Q]`, query positions.
        m: running maximum, in log2 units.
        beta: the tile's largest weight.
        l: row sum of the part so far, this tile included.
        lost: dropped share of `l` if this tile is skipped.
        known: `known_mass` of the context's first tile or of the sinks, which hold most of the weight.
        own: 1 in the part that reads that first tile itself, else 0.
        limits: the `SkipLimits`.
    """
    tau, budget, share = limits
    first = tl.exp2(tl.minimum(known - m, 99.0))  # finite; a smaller value is safe
    small = beta < tau * (l + (1.0 - own) * first)
    free = (p < 0) | (m <= NOTHING) | (small & (lost <= budget * (l + (share - own) * first)))
    return tl.min(free.to(tl.int32), 0) > 0
