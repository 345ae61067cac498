"""Weights of a tile of scores, and what sparse V may leave out of them. Queries are columns, scores in log2 units."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.jit.math import LOG2E, NOTHING, exp2_sas


@triton.jit
def soft_cap(s, cap):
    """Scores `s` in log2 units, capped by a `cap` in the units of the model: `cap * LOG2E * tanh(s / LOG2E / cap)`."""
    x = tl.exp2(-2.0 * tl.abs(s) / cap)
    t = cap * LOG2E * (1.0 - x) / (1.0 + x)
    return tl.where(s < 0, -t, t)


@triton.jit
def weights(s, top, running, threshold, C: tl.constexpr):
    """Exponentials against the tile's own maximum; SAS cuts against the running one."""
    x = s - top[None, :]
    if C.SAS:
        return exp2_sas(x, (threshold + running - top)[None, :])
    return tl.exp2(x)


@triton.jit
def weigh(s, m, threshold, C: tl.constexpr):
    """Weights of a tile against its own maximum; what older sums and its own are worth; the running maximum."""
    top = tl.max(s, 0)
    running = tl.maximum(m, top)
    return weights(s, top, running, threshold, C), tl.exp2(m - running), tl.exp2(top - running), running


@triton.jit
def count_visible(s):
    """How many tokens of a tile each query sees."""
    return tl.sum((s > NOTHING).to(tl.int32), 0)


@triton.jit
def known_mass(s, threshold, C: tl.constexpr):
    """Sum of the weights of a tile, in log2."""
    top = tl.max(s, 0)
    return tl.where(top > NOTHING, top + tl.log2(tl.sum(weights(s, top, top, threshold, C), 0)), NOTHING)


@triton.jit
def may_skip(p, m, beta, l, lost, known, own, limits):
    """Whether no query needs the values of a tile. `beta`: its largest weight; `l`, `lost`: the row sum of the part so
    far and what of it would be dropped, this tile included in both; `known`: `known_mass` of the context's first tile,
    or of sinks, which most of the weight goes to; `own`: 1 in the part that reads that tile itself, else 0.

    `beta` over the row sum only falls as more keys arrive, so no weight above tau is dropped. The budget is of what a
    part read itself, but for the known mass, in which all parts have one `share`: together the whole row sum. Columns
    without a query do not count, nor queries that saw nothing yet: what they have of `l` and `lost` is forgotten.
    """
    tau, budget, share = limits
    first = tl.exp2(tl.minimum(known - m, 99.0))  # finite, and less is safe
    small = beta < tau * (l + (1.0 - own) * first)
    free = (p < 0) | (m <= NOTHING) | (small & (lost <= budget * (l + (share - own) * first)))
    return tl.min(free.to(tl.int32), 0) > 0
