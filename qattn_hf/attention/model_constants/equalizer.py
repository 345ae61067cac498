"""Multipliers of key channels before the rotation, with the inverses for the query channels (`equalize_k`).

As in SmoothQuant (Xiao et al., arXiv 2211.10438), which moves what stands out from activations to weights, here from
keys to queries. With s = sqrt(rms(k) / rms(q)) keys and queries of a channel would have one size, and a rotation would
spread errors over channels that weigh alike. The scale is the root of that. The rotary embedding turns the two channels
of a pair into one another, and the pass knows the first 2,048 positions alone: farther on the whole s costs more than
it saves on a model whose channels differ little, while its root still gains, and takes most of what a key norm's weight
spoils.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from qattn_hf.attention.model_constants.compensation import observe
from qattn_hf.attention.observe import Call
from qattn_kernels.layer.spec import LayerSpec

LARGEST = 2.0**8  # of a scale, and its inverse the least: keys and queries stay within FP16
FIRST = 4  # tokens left out: attention sinks, whose keys are small in most channels and very large in a few


def equalizers(model: PreTrainedModel, wanted: dict[int, LayerSpec]) -> dict[int, torch.Tensor]:
    """`k.equalizer` of these layers, fp32 `[2, Hkv, D]`: multipliers of keys, and their inverses, of queries."""
    found: dict[int, torch.Tensor] = {}

    def observer(call: Call) -> None:
        if call.layer in wanted:
            found[call.layer] = equalizer(call.query[0], call.keys[0])

    observe(model, wanted, observer, gaps=False)
    return found


def equalizer(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """fp32 `[2, Hkv, D]` of queries `[Hq, T, D]` and keys `[Hkv, T, D]`. Channels that are zeros stay as they are."""
    of_head = query.float()[:, FIRST:].unflatten(0, (len(keys), -1)).flatten(1, 2)
    ratio = keys.float()[:, FIRST:].square().mean(1) / of_head.square().mean(1)
    power = ratio.log2() / 8  # of the root of s; the ratio is the fourth power of s
    known = power.isfinite()
    power = power.where(known, 0.0)
    mean = power.sum(-1, keepdim=True) / known.sum(-1, keepdim=True).clamp_min(1)
    scale = (power - mean).where(known, 0.0).exp2().clamp(1 / LARGEST, LARGEST)
    return torch.stack([1 / scale, scale])
