"""Attention over tiles of stored tokens with an online softmax: the arithmetic that prefill and decode share.

A tile is a block of keys and values in the form of its format. Each stored token records which queries see it, so
packed blocks, the ring and new tokens need no special cases. All heads, queries and tiles are computed at once.
`reference/papers/` has the papers' algorithms, each as a loop over tiles in the paper's symbols, with the same numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from qattn_kernels.formats import Operand
from qattn_kernels.formats.base import int8_tokens
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.skip_counts import SkipCounts, count_skips
from qattn_kernels.layer.spec import Compute, Sparsity
from qattn_kernels.reference.operands import FP8, fp8_values, rounded
from qattn_kernels.reference.queries import Queries
from qattn_kernels.reference.softmax import sas_exp
from qattn_kernels.reference.tiles import Tiles, visible


class Attended(NamedTuple):
    """Attention output of a call.

    Attributes:
        out: fp32 `[B, Hq, T, Dv]`; NaN for a non-finite query, zeros for one that sees no token.
        lse: fp32 log-sum-exp `[B, Hq, T]`; -inf for a query that sees no token. A non-finite query counts as a zero
            query.
        skip_counts: counters of sparse V, or None if it is off.
    """

    out: torch.Tensor
    lse: torch.Tensor
    skip_counts: SkipCounts | None = None


class _Arithmetic(NamedTuple):
    """Variants of the arithmetic that a call uses, from its `Compute`.

    Attributes:
        int8_values: weights are rounded to INT8 and multiplied with INT8 values.
        fp8_values: weights are rounded to FP8; values already are (`operands`).
        tile: INT8 weights of `block_q` queries share a scale in each tile; otherwise each query has its own.
        running: weights are relative to the running maximum of the tiles so far, in order; otherwise to the tile's own.
            SAS cuts, shared scales (`tile`) and FP8 underflow depend on that maximum.
    """

    int8_values: bool
    fp8_values: bool
    tile: bool
    running: bool


def _arithmetic(compute: Compute, prefill: bool) -> _Arithmetic:
    int8 = (compute.prefill if prefill else compute.decode) == "int8"
    fp8, tile = prefill and fp8_values(compute), prefill and compute.p_scale == "tile"
    return _Arithmetic(int8 and compute.pv == "int8", fp8, tile, compute.softmax == "sas" or tile or fp8)


def _integers(x: Operand, levels: int) -> Operand:
    """Return `x` if it is quantized, else its INT8 codes up to `levels` with one scale per token."""
    return x if x.scale is not None else int8_tokens(x.x.float(), levels)


def _scores(q: Queries, tiles: Tiles, scores: Scores, levels: int) -> torch.Tensor:
    """Return scores fp32 `[B, Hkv, G, T, n, block]` of each query and token, soft-capped, not masked.

    Adds back the means that smoothing subtracted from queries and keys."""
    heads = tiles.k.x.shape[1]

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bhgtd,bhnkd->bhgtnk", left.unflatten(1, (heads, -1)), right)

    if q.coded is None:
        s = product(q.exact, tiles.k.dequantize())
    else:
        k = _integers(tiles.k, levels)
        s = product(q.coded.x.float(), k.x.float())  # 8-bit products sum exactly in fp32 up to D = 1024
        s = s * q.coded.scales.unflatten(1, (heads, -1))[..., None, None] * k.scales[:, :, None, None]
        # fp64: rounded from there, scores do not depend on the call's shape. Otherwise rounded weights would depend on
        # it too.
        if q.mean is not None and tiles.k_exact is not None:
            s = s + product(q.mean.double(), tiles.k_exact.double()).float()
        if k.mean is not None:
            s = s + product(q.exact.double(), k.mean.double()).float()
    return scores.softcap * torch.tanh(s / scores.softcap) if scores.softcap else s


def _rounded(p: torch.Tensor, v: Operand, levels: int, tile_rows: int) -> Operand:
    """Return INT8 weights `[B, Hkv, G, T, n, block]` with fp32 scales `[B, Hkv, G, T, n]`.

    A value's token scale multiplies its weight. The weights of a query in a tile are then divided by their maximum /
    `levels` and rounded. With `tile_rows` > 1, that many queries of a head share the maximum (the tile of
    TurboAttention's Algorithm 1)."""
    w = p * v.scales[:, :, None, None]
    top = w.amax(-1)
    if tile_rows > 1:
        pad = -top.shape[3] % tile_rows
        tiles = torch.nn.functional.pad(top, (0, 0, 0, pad)).unflatten(3, (-1, tile_rows))
        top = tiles.amax(4).repeat_interleave(tile_rows, 3)[:, :, :, : p.shape[3]]
    scale = top / levels
    return Operand(torch.round(w / torch.where(scale == 0, 1.0, scale)[..., None]), scale)


def _rounded_sums(p: torch.Tensor, v: Operand, levels: int, tile_rows: int) -> torch.Tensor:
    """Return row sums `[B, Hkv, G, T, n]` of the rounded weights (INT-FlashAttention).

    A zero value has no scale, and its weight counts unrounded."""
    scale = v.scales[:, :, None, None]
    weights = _rounded(p, v, levels, tile_rows).dequantize() / torch.where(scale == 0, 1.0, scale)
    return torch.where(scale == 0, p, weights).sum(-1)


def _weighted_values(p: torch.Tensor, v: Operand, int8: bool, levels: int, tile_rows: int) -> torch.Tensor:
    """Return `sum_k p v` of each tile, fp32 `[B, Hkv, G, T, n, Dv]`, for weights `p` `[B, Hkv, G, T, n, block]`.

    With `int8`, weights are rounded by `_rounded`."""
    if not int8:
        return torch.einsum("bhgtnk,bhnkd->bhgtnd", p, v.dequantize())
    weights = _rounded(p, v, levels, tile_rows)
    return torch.einsum("bhgtnk,bhnkd->bhgtnd", weights.x, v.x.float()) * weights.scales[..., None]


def _skip(weight: torch.Tensor, sparsity: Sparsity) -> torch.Tensor:
    """Return which final weights `[B, Hkv, G, T, n, block]` sparse V skips.

    It skips weights below `tau` in order, while the dropped mass stays within the budget. Kernels do not know the final
    row sum yet and skip fewer, see `Sparsity`."""
    flat = weight.flatten(-2)
    small = (flat < sparsity.tau) & (flat > 0)
    dropped = torch.where(small, flat, 0.0).cumsum(-1)
    return (small & (dropped <= sparsity.budget)).unflatten(-1, weight.shape[-2:])


def attend(
    q: Queries,
    q_pos: torch.Tensor,
    tiles: Tiles,
    scores: Scores,
    compute: Compute,
    sparsity: Sparsity,
    prefill: bool,
) -> Attended:
    """Compute the attention of queries at row positions `q_pos` `[B, T]`, negative for padding, over tiles, in fp32.

    Each tile has separate weights, row sums and products, relative to the maximum of `_Arithmetic.running`, which exact
    exponentials merge. Row sums, and thus the log-sum-exp, use unrounded weights, or rounded ones with
    `compute.round_sum`. Sparse V acts in a decode only."""
    how, levels = _arithmetic(compute, prefill), compute.pv_levels
    tile_rows = compute.block_q if how.tile else 1
    v = _integers(tiles.v, levels) if how.int8_values else tiles.v._replace(mean=None)
    heads, group = tiles.k.x.shape[1], q.exact.shape[1] // tiles.k.x.shape[1]
    see = visible(tiles, q_pos, scores.window)[:, :, None]
    s = _scores(q, tiles, scores, compute.qk_levels).masked_fill(~see, -torch.inf)

    # online softmax: maximum, weights and row sum of each tile `[B, Hkv, G, T, n]`
    top = s.amax(-1)
    top = top.cummax(-1).values if how.running else top
    p = s - torch.where(top.isneginf(), 0.0, top)[..., None]
    p = sas_exp(p, compute.sas_threshold) if compute.softmax == "sas" else torch.exp(p)
    sums = _rounded_sums(p, v, levels, tile_rows) if how.int8_values and compute.round_sum else p.sum(-1)

    # final maximum and row sum `[B, Hkv, G, T]`, and the factor that rescales each tile to them; a learned sink adds
    # weight but no value
    last = top.amax(-1)
    sinks = None if scores.sinks is None else scores.sinks.float().view(1, heads, group, 1)
    last = last if sinks is None else torch.maximum(last, sinks)
    last = torch.where(last.isneginf(), 0.0, last)
    rescale = torch.exp(top - last[..., None])
    total = (sums * rescale).sum(-1)
    total = total if sinks is None else total + torch.exp(sinks - last)

    skip_counts = None
    if sparsity.tau > 0 and not prefill:
        weight = p * (rescale / torch.where(total == 0, 1.0, total)[..., None])[..., None]
        skip = _skip(weight, sparsity)
        skip_counts = count_skips(weight, skip, see, q_pos)
        p = torch.where(skip, 0.0, p)
    if how.fp8_values:
        largest = torch.finfo(FP8[compute.pv]).max
        p = rounded(p * largest, compute.pv) / largest
    out = (_weighted_values(p, v, how.int8_values, levels, tile_rows) * rescale[..., None]).sum(-2)
    out = out / torch.where(total == 0, 1.0, total)[..., None]
    if tiles.v.mean is not None:  # add back the mean that smoothing subtracted
        out = torch.where(total[..., None] == 0, 0.0, out + tiles.v.mean[:, :, None, None, 0, 0])
    broken = q.broken & (q_pos >= 0)[:, None]
    out = out.flatten(1, 2).masked_fill(broken[..., None], torch.nan)
    return Attended(out, (last + total.log()).flatten(1, 2), skip_counts)
