"""Attention over tiles of stored tokens: the arithmetic that prefill and decode share.

A tile is a block of keys and values in the form of its format. Each stored token says which queries see it, so packed
blocks, the ring and new tokens need no cases here.
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
    """`out` fp32 `[B, Hq, T, Dv]`, `lse` fp32 `[B, Hq, T]` (-inf: nothing seen); of sparse V its `skip_counts`. A query
    that is not finite has an `out` of NaN, and the `lse` of a query of zeros."""

    out: torch.Tensor
    lse: torch.Tensor
    skip_counts: SkipCounts | None = None


def _integers(x: Operand, levels: int) -> Operand:
    """`x` itself if it has codes, else INT8 of each token."""
    return x if x.scale is not None else int8_tokens(x.x.float(), levels)


def _scores(q: Queries, tiles: Tiles, scores: Scores, levels: int) -> torch.Tensor:
    """fp32 `[B, Hkv, G, T, n, block]`, capped, not masked."""
    heads = tiles.k.x.shape[1]

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bhgtd,bhnkd->bhgtnk", left.unflatten(1, (heads, -1)), right)

    if q.coded is None:
        s = product(q.exact, tiles.k.dequantize())
    else:
        k = _integers(tiles.k, levels)
        s = product(q.coded.x.float(), k.x.float())  # sums of 8-bit products are exact in fp32 up to D = 1024
        s = s * q.coded.scales.unflatten(1, (heads, -1))[..., None, None] * k.scales[:, :, None, None]
        # in fp64: rounded from there they do not depend on the shape of the call, on which rounded weights would
        if q.mean is not None and tiles.k_exact is not None:
            s = s + product(q.mean.double(), tiles.k_exact.double()).float()
        if k.mean is not None:
            s = s + product(q.exact.double(), k.mean.double()).float()
    return scores.softcap * torch.tanh(s / scores.softcap) if scores.softcap else s


def _rounded(p: torch.Tensor, v: Operand, levels: int, tile_rows: int) -> Operand:
    """INT8 weights `[B, Hkv, G, T, n, block]` with fp32 scales `[B, Hkv, G, T, n]`.

    A value's token scale is multiplied into its weight, then the weights of a row in a tile are scaled by their
    maximum / `levels` and rounded; `tile_rows` > 1 shares that maximum among so many queries (the paper's tile).
    """
    w = p * v.scales[:, :, None, None]
    top = w.amax(-1)
    if tile_rows > 1:
        pad = -top.shape[3] % tile_rows
        tiles = torch.nn.functional.pad(top, (0, 0, 0, pad)).unflatten(3, (-1, tile_rows))
        top = tiles.amax(4).repeat_interleave(tile_rows, 3)[:, :, :, : p.shape[3]]
    scale = top / levels
    return Operand(torch.round(w / torch.where(scale == 0, 1.0, scale)[..., None]), scale)


def _rounded_sums(p: torch.Tensor, v: Operand, levels: int, tile_rows: int) -> torch.Tensor:
    """Row sums `[B, Hkv, G, T, n]` of the rounded weights; a weight of zeros, which have no scale, stays as it was."""
    scale = v.scales[:, :, None, None]
    weights = _rounded(p, v, levels, tile_rows).dequantize() / torch.where(scale == 0, 1.0, scale)
    return torch.where(scale == 0, p, weights).sum(-1)


def _weighted_values(p: torch.Tensor, v: Operand, int8: bool, levels: int, tile_rows: int) -> torch.Tensor:
    """`sum_k p v` of each tile: `p` `[B, Hkv, G, T, n, block]` to fp32 `[B, Hkv, G, T, n, Dv]`; INT8: of `_rounded`."""
    if not int8:
        return torch.einsum("bhgtnk,bhnkd->bhgtnd", p, v.dequantize())
    weights = _rounded(p, v, levels, tile_rows)
    return torch.einsum("bhgtnk,bhnkd->bhgtnd", weights.x, v.x.float()) * weights.scales[..., None]


def _skip(weight: torch.Tensor, sparsity: Sparsity) -> torch.Tensor:
    """Sparse V: of final weights `[B, Hkv, G, T, n, block]` those below `tau`, in order, while what they drop stays
    within the budget. Kernels, which do not know the final row sum yet, skip fewer: see `Sparsity`."""
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
    """Attention of queries at row positions `q_pos` `[B, T]` over tiles, in fp32.

    Each tile's weights are taken against its own row maximum (`sas`, `p_scale: tile` and FP8: against the running one,
    tiles in order, because the cut, the shared scale and what is too small depend on it) and merged by exact
    exponentials, TurboAttention Algorithms 1 and 2. Row sums, and with them the log-sum-exp, are of the unrounded
    weights, or of the rounded ones if `round_sum` says so.
    """
    int8 = (compute.prefill if prefill else compute.decode) == "int8"
    int8_values = int8 and compute.pv == "int8"
    v = _integers(tiles.v, compute.pv_levels) if int8_values else tiles.v._replace(mean=None)
    heads, group = tiles.k.x.shape[1], q.exact.shape[1] // tiles.k.x.shape[1]
    see = visible(tiles, q_pos, scores.window)[:, :, None]
    s = _scores(q, tiles, scores, compute.qk_levels).masked_fill(~see, -torch.inf)
    top = s.amax(-1)
    sas, fp8 = compute.softmax == "sas", prefill and fp8_values(compute)
    tile = prefill and compute.p_scale == "tile"
    top = top.cummax(-1).values if sas or tile or fp8 else top
    base = torch.where(top.isneginf(), 0.0, top)
    p = s - base[..., None]
    p = sas_exp(p, compute.sas_threshold) if sas else torch.exp(p)
    levels, tile_rows = compute.pv_levels, compute.block_q if tile else 1
    sums = _rounded_sums(p, v, levels, tile_rows) if int8_values and compute.round_sum else p.sum(-1)

    last = top.amax(-1)
    sinks = None if scores.sinks is None else scores.sinks.float().view(1, heads, group, 1)
    last = last if sinks is None else torch.maximum(last, sinks)
    last = torch.where(last.isneginf(), 0.0, last)
    share = torch.exp(top - last[..., None])
    total = (sums * share).sum(-1)
    total = total if sinks is None else total + torch.exp(sinks - last)
    skip_counts = None
    if sparsity.tau > 0 and not prefill:
        weight = p * (share / torch.where(total == 0, 1.0, total)[..., None])[..., None]
        skip = _skip(weight, sparsity)
        skip_counts = count_skips(weight, skip, see, q_pos)
        p = torch.where(skip, 0.0, p)
    if fp8:
        largest = torch.finfo(FP8[compute.pv]).max
        p = rounded(p * largest, compute.pv) / largest
    out = (_weighted_values(p, v, int8_values, levels, tile_rows) * share[..., None]).sum(-2)
    out = out / torch.where(total == 0, 1.0, total)[..., None]
    if tiles.v.mean is not None:  # what smoothing took off, once
        out = torch.where(total[..., None] == 0, 0.0, out + tiles.v.mean[:, :, None, None, 0, 0])
    broken = q.broken & (q_pos >= 0)[:, None]
    out = out.flatten(1, 2).masked_fill(broken[..., None], torch.nan)
    return Attended(out, (last + total.log()).flatten(1, 2), skip_counts)
