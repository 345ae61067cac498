"""Attention of finite queries that each see a token, in plain PyTorch: `attention.attend` in fewer operations.

Operations work in place, and the caller masks scores. Numbers are the same: products of integers are exact in fp32 in
any order, and all else is computed as there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qattn_kernels.formats import Operand
from qattn_kernels.formats.base import int8_tokens
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import Compute
from qattn_kernels.reference.softmax import sas_exp

LOWEST = torch.finfo(torch.float32).min


def _integers(x: Operand, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of `x`, of INT8 codes up to `levels` if it has no scales."""
    coded = int8_tokens(x.x.float(), levels) if x.scale is None else x
    return coded.x.float(), coded.scales


def _key_products(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return `[B, Hkv, G * T, n, block]`: fp32 `q` `[B, Hkv, G * T, D]` times keys `[B, Hkv, n, block, D]`."""
    return (q @ k.flatten(2, 3).mT).unflatten(3, k.shape[2:4])


def _scores(q: torch.Tensor, coded: Operand | None, k: Operand, compute: Compute, softcap: float) -> torch.Tensor:
    """Return the scores `[B, Hkv, G * T, n, block]` of the queries, soft-capped, not masked."""
    shape = (len(q), k.x.shape[1], -1, q.shape[3])
    q = q.reshape(shape)
    if coded is not None:
        codes, scales = _integers(k, compute.qk_levels)
        s = _key_products(coded.x.float().reshape(shape), codes)
        s.mul_(coded.scales.reshape(*shape[:3], 1, 1)).mul_(scales.unsqueeze(2))
        if k.mean is not None:
            s.add_((q.double() @ k.mean.squeeze(3).double().mT).float().unsqueeze(4))
    else:
        s = _key_products(q, k.dequantize())
    return s.div_(softcap).tanh_().mul_(softcap) if softcap else s


def _rounded_products(p: torch.Tensor, v: Operand, compute: Compute) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row sums `[B, Hkv, G * T, n]` of weights `p`, and products `[B, Hkv, n, G * T, D]` of rounded weights."""
    codes, scales = _integers(v, compute.pv_levels)
    scales = scales.unsqueeze(2)
    w = p * scales
    scale = w.amax(-1) / compute.pv_levels
    w.div_(torch.threshold(scale, 0.0, 1.0).unsqueeze(4)).round_()
    if compute.round_sum:
        none = scales == 0
        sums = torch.where(none, p, w * scale[..., None] / torch.where(none, 1.0, scales)).sum(-1)
    else:
        sums = p.sum(-1)
    return sums, (w.transpose(2, 3) @ codes).mul_(scale.transpose(2, 3).unsqueeze(4))


def attend_finite(
    q: torch.Tensor,
    coded: Operand | None,
    k: Operand,
    v: Operand,
    hide: Callable[[torch.Tensor], None],
    compute: Compute,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attention.attend` for finite queries. None may share the scale of its weights with another.

    Args:
        q: fp32 `[B, Hq, T, D]`, multiplied by the softmax scale.
        coded: `q` in INT8, for integer products; else None.
        k, v: keys and values of the rows, `[B, Hkv, n, block, D]`; `v` has no mean. Slots without a token
            hold any finite numbers.
        hide: sets scores `[B, Hkv, G * T, n, block]` of tokens that a query does not see to -inf.
        compute: the layer's arithmetic.
        scores: soft cap and sinks of the scores.

    Returns:
        fp32 output `[B, Hq, T, Dv]` and log-sum-exp `[B, Hq, T]`, -inf for a query that sees no token.
    """
    heads, shape = k.x.shape[1], q.shape[:3]
    s = _scores(q, coded, k, compute, scores.softcap)
    hide(s)

    # weights and row sum of each tile, relative to its maximum; the factor that rescales it to the last maximum
    top = s.amax(-1).clamp_(LOWEST)  # a tile may have no visible token
    top = top.cummax(-1).values if compute.softmax == "sas" else top
    s.sub_(top.unsqueeze(4))
    p = sas_exp(s, compute.sas_threshold) if compute.softmax == "sas" else s.exp_()
    last = top.amax(-1)
    sinks = None
    if scores.sinks is not None:
        sinks = scores.sinks.float().repeat_interleave(shape[2]).view(1, heads, -1)
    last = last if sinks is None else torch.maximum(last, sinks)
    rescale = (top - last.unsqueeze(3)).exp_()
    if coded is not None and compute.pv == "int8":
        sums, out = _rounded_products(p, v, compute)
    else:
        sums, out = p.sum(-1), p.transpose(2, 3) @ v.dequantize()
    total = (sums * rescale).sum(-1)
    total = total if sinks is None else total + torch.exp(sinks - last)
    out = out.mul_(rescale.transpose(2, 3).unsqueeze(4)).sum(2).div_(total.unsqueeze(3))
    lse = last + total.log()
    return out.view(*shape, -1), lse.view(shape)
