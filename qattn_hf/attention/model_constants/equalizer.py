"""Factors of key channels before the rotation, and their inverses for query channels (`equalize_k`).

SmoothQuant (Xiao et al., arXiv 2211.10438) moves outliers from activations to weights. This module moves them from keys
to queries. Let s = sqrt(rms(k) / rms(q)) for a channel. Dividing keys by s and multiplying queries by s would give both
equal size. A rotation would then spread errors over channels of equal weight.

The scale in use is sqrt(s). The rotary embedding mixes the two channels of a pair, and the pass covers only the first
2,048 positions. At later positions the full s costs more than it saves on models with similar channels. Its root still
helps there, and removes most of the damage from a key norm's weights.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from qattn_hf.attention.model_constants.compensation import observe
from qattn_hf.attention.observe import Call
from qattn_kernels.layer.spec import LayerSpec

LARGEST = 2.0**8  # upper bound of a factor, inverse of the lower bound: keys and queries stay within FP16
FIRST = 4  # skipped tokens: attention sinks, whose keys are small in most channels and very large in a few


def equalizers(model: PreTrainedModel, wanted: dict[int, LayerSpec]) -> dict[int, torch.Tensor]:
    """Return `k.equalizer` of these layers, fp32 `[2, Hkv, D]`: factors of keys, and their inverses for queries."""
    found: dict[int, torch.Tensor] = {}

    def observer(call: Call) -> None:
        if call.layer in wanted:
            found[call.layer] = equalizer(call.query[0], call.keys[0])

    observe(model, wanted, observer, gaps=False)
    return found


def equalizer(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return fp32 `[2, Hkv, D]` for queries `[Hq, T, D]` and keys `[Hkv, T, D]`. Channels of zeros get factor 1."""
    of_head = query.float()[:, FIRST:].unflatten(0, (len(keys), -1)).flatten(1, 2)
    ratio = keys.float()[:, FIRST:].square().mean(1) / of_head.square().mean(1)
    power = ratio.log2() / 8  # exponent of sqrt(s): the ratio is the fourth power of s
    known = power.isfinite()
    power = power.where(known, 0.0)
    mean = power.sum(-1, keepdim=True) / known.sum(-1, keepdim=True).clamp_min(1)
    scale = (power - mean).where(known, 0.0).exp2().clamp(1 / LARGEST, LARGEST)
    return torch.stack([1 / scale, scale])
