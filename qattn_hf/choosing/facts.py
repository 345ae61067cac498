"""Measure facts about a model's attention, keys and values. They give the reasons for a choice."""

from __future__ import annotations

from statistics import median

import torch
from transformers import PreTrainedModel

from qattn_hf.attention.observe import Call, attention_mass, observed
from qattn_hf.model.decoder import decoder_of
from qattn_hf.model.device import device_of

FIRST = 4  # first tokens left out of spreads: attention sinks differ from all other tokens
SINKS = 3  # number of tokens that a pool of sinks keeps by default
TINY = 1e-12


@torch.no_grad()
def facts_of(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, float]:
    """Measure facts during one call over `ids` `[1, T]`, each as a median over the packed layers:

    - `sink_share`: share of attention that the `SINKS` most attended tokens of a head get, mean over heads.
    - `key_spread`: root mean square of a head's largest key channel over the median channel's, for the largest head.
    - `key_bias`: share of the mean squared key that the mean key makes up, mean over heads.
    - `value_spread`: the same ratio as `key_spread`, for values.
    """
    found: list[dict[str, float]] = []

    def observer(call: Call) -> None:
        keys, values = (x[0, :, FIRST:].float() for x in (call.keys, call.values))
        mass = attention_mass(call)
        found.append(
            {
                "sink_share": float((mass.topk(min(SINKS, mass.shape[1])).values.sum(1) / mass.sum(1)).mean()),
                "key_spread": _spread(keys),
                "key_bias": float((keys.mean(1).square().sum(-1) / (keys.square().mean(1).sum(-1) + TINY)).mean()),
                "value_spread": _spread(values),
            }
        )

    with observed(model, observer):
        decoder_of(model)(ids.to(device_of(model)), use_cache=False)
    return {name: median(one[name] for one in found) for name in found[0]} if found else {}


def _spread(x: torch.Tensor) -> float:
    """Return the largest channel's root mean square over the median channel's, in vectors `[H, T, D]`, largest head."""
    size = x.square().mean(1).sqrt()
    return float((size.amax(-1) / (size.median(-1).values + TINY)).max())
