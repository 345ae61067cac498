"""Softmax weights of a prefill tile, from its products of queries and keys; see `ops/prefill/kernel.py`.

Arguments of the functions:

- `x` `[BM, BN]`: the products. Integer sums come as floats `ROUNDER + sum`, and the multiply-add that scales them
  subtracts `ROUNDER` again.
- `unit`: value of 1 of a product in log2 units, a scalar for all queries or `[BM]` (`row_weights`, `group_weights`).
- `head`: the `kernel.HeadKV`. Its `bias` is -inf in masked slots, else the logarithm of the value's scale. Its
  `v_factor` is 1 / that scale. For `row_weights`, `bias` is -inf or 0 and `v_factor` the scale itself.
- `sums`: the `kernel.Sums` before the tile. Its maxima start at the finite `NOTHING`.
- `C`: a `launch.constants.PrefillSizes`.

Each `_weights` function returns the weights `[BM, BN]` and four vectors `[BM]`: the sum of the weights, the largest
score of the tile, the largest score so far, and `peak`. `peak` is the largest score without the values' scales, which
SAS cuts against. For INT8 values (`C.V_INT8`), weights and sum are relative to the tile's largest score. Otherwise they
are relative to the largest score so far."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.jit.math import LOG2E, ROUNDER, exp2_sas, short_scale, sum_of_raised

NEGATIVE = tl.constexpr(float("-inf"))
LEVELS = tl.constexpr(127.0)  # levels of weights: the full range, more precise than the 119 of stored tokens
LOG2_LEVELS = tl.constexpr(6.988684686772166)
LARGEST = tl.constexpr(448.0)  # largest E4M3 number, which weights are scaled by
LOG2_LARGEST = tl.constexpr(8.807354922057604)
# A block counts as small if its value scale is this far (in log2) below the tile's largest. The weights contain that
# scale, so rounding leaves them few levels or none. The row sum of such a block uses the weights before rounding.
SMALL_VALUES = tl.constexpr(3.0)
NO_SCALE = tl.constexpr(1e-24)  # replaces a scale of 0: small, with a finite inverse


@triton.jit
def factor(cap, C: tl.constexpr):
    """Return the factor from scores to log2 units, or with a soft cap to the exponent `y` of the cap's tanh.

    The tanh is `1 - 2 / (2^y + 1)` with `2^y = exp(2 * score / cap)`. `cap` itself is in log2 units, hence the second
    `LOG2E`."""
    return 2.0 * LOG2E * LOG2E / cap if C.SOFTCAP else LOG2E


@triton.jit
def exponentials(x, cut, C: tl.constexpr):
    """Return `2^x`. With SAS, use its approximation, which is 0 for `x` below `cut`."""
    return exp2_sas(x, cut) if C.SAS else tl.exp2(x)


@triton.jit
def block_weights(x, unit, sums, head, n0, threshold, BN: tl.constexpr, C: tl.constexpr):
    """Return the weights of a tile of whole blocks from its integer sums `x`.

    A block has one scale, so its largest sum gives its largest score. One multiply-add then turns a sum into its
    exponent.

    The terms with `ROUNDER` are large, so their difference errs by up to one unit of a sum. Scores are therefore taken
    relative to one unit above the largest, because a weight beyond 127 would wrap to a negative INT8."""
    PARTS: tl.constexpr = (BN + C.BLOCK - 1) // C.BLOCK
    top, peak = sums.m, sums.peak
    block = n0 + tl.arange(0, PARTS) * C.BLOCK
    r = tl.load(head.v_factor + block)[None, :]
    a = tl.load(head.k_scale + block)[None, :] * unit
    b = tl.load(head.bias + block)[None, :] - a * ROUNDER
    x = x.reshape(C.BM, PARTS, BN // PARTS)
    best = tl.max(x, 2) * a + b
    here = tl.max(best, 1) + tl.max(a, 1)
    base = here - LOG2_LEVELS
    cut = best
    if C.SAS:
        bare = tl.log2(r)
        peak = tl.maximum(peak, tl.max(best + bare, 1))
        cut = (peak + threshold - base)[:, None] - bare
    p = exponentials(x * a[:, :, None] + (b - base[:, None])[:, :, None], cut[:, :, None], C)
    return p.reshape(C.BM, BN), tl.sum(tl.sum(p, 2) * r, 1), here, tl.maximum(top, here), peak


@triton.jit
def token_scores(x, unit, head, n, cap, k_mean_scores, C: tl.constexpr):
    """Return scores `[BM, BN]` in log2 units plus the logarithm of each value's scale, and 1 / that scale, `[BN]`.

    With one scale per query, `x` is already multiplied by it and has no `ROUNDER`. `k_mean_scores` `[BM]` is the part
    of the score that smoothing removed from the keys. A plain softmax would cancel it, a cap does not."""
    b = tl.load(head.bias + n)
    r = tl.full([x.shape[1]], 1.0, tl.float32)
    a = r * unit
    if C.K_INT8:
        a = tl.load(head.k_scale + n) * unit
    if C.V_INT8:
        r = tl.load(head.v_factor + n)
    low = a * (-ROUNDER if C.K_INT8 and C.Q_GROUP == "block" else 0.0)
    if C.SMOOTH_Q != "none":
        low += tl.load(head.shift + n) * factor(cap, C)
    if C.SOFTCAP:  # `unit` turns this into the exponent of the tanh
        y = x * a[None, :] + low[None, :]
        if C.SMOOTH_K:
            y += k_mean_scores[:, None]
        s = cap - 2.0 * cap / (tl.exp2(y) + 1.0) + b[None, :]
    else:
        s = x * a[None, :] + (low + b)[None, :]
    return s, r


@triton.jit
def row_weights(x, unit, sums, head, n0, order, see, BN: tl.constexpr, MASK: tl.constexpr, C: tl.constexpr):
    """Return the weights of a tile from its integer sums `x`, for keys with one scale per token.

    Scores stay in the unit of their query until the exponent, where the query's scale costs nothing. FP8 weights are
    relative to the running maximum, times `LARGEST`. INT8 weights are relative to the tile's own maximum and include
    their block's value scale.

    With `C.RAISED`, INT8 weights come with `ROUNDER` added, which rounds each weight into the low byte of its float.
    The row sum then adds the rounded weights. Blocks with very small values (`SMALL_VALUES`) add their unrounded
    weights."""
    PARTS: tl.constexpr = BN // min(BN, C.BLOCK)
    top, peak, n = sums.m, sums.peak, n0 + order
    mask, a = tl.load(head.bias + n), tl.load(head.k_scale + n)
    if C.Q_LEVELS < LEVELS:  # sums of 4-bit codes are small, so `a * ROUNDER` must be exact
        a = short_scale(a)
    if C.PLAIN:  # the interpreter rounds the product before the sum
        s = (x - ROUNDER) * a[None, :] + mask[None, :]
    else:
        s = x * a[None, :] + (mask - a * ROUNDER)[None, :]
    if C.SMOOTH_Q != "none":
        s = s * unit[:, None] + (tl.load(head.shift + n) * LOG2E)[None, :]
        unit = tl.full([C.BM], 1.0, tl.float32)
    if MASK:
        s = tl.where(see, s, NEGATIVE)
    if C.V_FP8:
        here = tl.max(s, 1) * unit
        new = tl.maximum(top, here)
        p = tl.exp2(s * unit[:, None] - (new - LOG2_LARGEST)[:, None])
        mass = tl.sum(p, 1)
    else:
        v_scale = tl.maximum(tl.load(head.v_factor + n0 + tl.arange(0, PARTS) * C.BLOCK), NO_SCALE)
        log_scale = tl.log2(v_scale)
        s = tl.reshape(s, (C.BM, PARTS, BN // PARTS))
        here = tl.max(tl.max(s, 2) * unit[:, None] + log_scale[None, :], 1)
        new = tl.maximum(top, here)
        base = tl.where(here == NEGATIVE, 0.0, here) - LOG2_LEVELS
        p = tl.exp2(s * unit[:, None, None] + (log_scale[None, :] - base[:, None])[:, :, None])
        masses = tl.sum(p, 2)
        if C.RAISED:
            p += ROUNDER
            small = log_scale < tl.max(log_scale, 0) - SMALL_VALUES
            masses = tl.where(small[None, :], masses, sum_of_raised(p, 2))
        mass = tl.sum(masses * (1.0 / v_scale)[None, :], 1)
        p = tl.reshape(p, (C.BM, BN))
    return p, mass, here, new, peak


@triton.jit
def group_weights(x, unit, sums, head, n0, BN: tl.constexpr, C: tl.constexpr):
    """Return FP8 weights of a tile from its integer sums `x`, where keys share scales in groups and no key is masked.

    The largest sum of a group gives its largest score, so one multiply-add turns a sum into its exponent. Groups are
    those of `thread` (`formats.granularity`), four per 64 tokens. `kernel._key_order` assigns tokens to columns. Bits 3
    and 1 of a column number are then the low and the high bit of its group:

        column    0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15   | 16 ...
        token     0  1  4  5  8  9 12 13  2  3  6  7 10 11 14 15   | 16 ...
        group     0  0  2  2  0  0  2  2  1  1  3  3  1  1  3  3   |  0 ...

        bits of a column   5 4 |   3 | 2 |    1 | 0
        dims of `y`          4 |   2 | 2 |    2 | 2     after the dims of queries and parts of 64
        bits of a group        | low |   | high |
    """
    top, peak = sums.m, sums.peak
    PARTS: tl.constexpr = BN // 64
    part, two = tl.arange(0, PARTS) * 64, tl.arange(0, 2) * 2
    group = part[:, None, None] + two[None, :, None] + 2 * two[None, None, :]  # first token of each group
    a = short_scale(tl.load(head.k_scale + n0 + group)[None, :, :, :] * unit[:, None, None, None])
    y = tl.reshape(x, (C.BM, PARTS, 4, 2, 2, 2, 2))  # bits 5 and 4, 3, 2, 1, 0 of the column
    most = tl.max(tl.max(y, 6), 2)
    best = most * a[:, :, :, None, :] - (a * ROUNDER)[:, :, :, None, :]
    here = tl.max(tl.reshape(best, (C.BM, PARTS * 8)), 1)
    new = tl.maximum(top, here)
    bias = (a * -ROUNDER) - (new - LOG2_LARGEST)[:, None, None, None]
    p = tl.exp2(y * a[:, :, None, :, None, :, None] + bias[:, :, None, :, None, :, None])
    p = tl.reshape(p, (C.BM, BN))
    return p, tl.sum(p, 1), here, new, peak


@triton.jit
def token_weights(s, r, sums, threshold, C: tl.constexpr):
    """Return the weights of a tile from its scores.

    INT8 weights are relative to the tile's own maximum, other weights to the running maximum."""
    top, peak = sums.m, sums.peak
    here = tl.max(s, 1)
    new = tl.maximum(top, here)
    base = new
    if C.V_INT8:
        base = tl.where(here == NEGATIVE, 0.0, here) - LOG2_LEVELS
    if C.V_FP8:
        base -= LOG2_LARGEST
    cut = s
    if C.SAS:  # SAS cuts by the score alone, without the value's scale
        bare = tl.log2(tl.maximum(r, NO_SCALE))[None, :]
        peak = tl.maximum(peak, tl.max(s + bare, 1))
        cut = (peak + threshold - base)[:, None] - bare
    p = exponentials(s - base[:, None], cut, C)
    return p, tl.sum(p * r[None, :] if C.V_INT8 else p, 1), here, new, peak
