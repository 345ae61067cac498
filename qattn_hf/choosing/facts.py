"""What a probe shows of a model's attention, keys and values: the reasons behind a choice."""

from __future__ import annotations

from statistics import median

import torch
from transformers import PreTrainedModel

from qattn_hf.attention.observe import Call, attention_mass, observed
from qattn_hf.model.decoder import decoder_of
from qattn_hf.model.device import device_of

FIRST = 4  # tokens whose keys and values do not count for spreads: attention sinks are unlike all others
SINKS = 3  # tokens that a pool of sinks keeps by default
TINY = 1e-12


@torch.no_grad()
def facts_of(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, float]:
    """Median over the packed layers of what one call over `ids` `[1, T]` shows:

    - `sink_share`: share of attention that the `SINKS` most attended tokens of a head get, mean over heads.
    - `key_spread`: root mean square of a head's largest key channel over its median channel's, largest head.
    - `key_bias`: share of the mean squared key that the mean key makes up, mean over heads.
    - `value_spread`: as `key_spread`, of values.
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
    """Of vectors `[H, T, D]`: the largest channel's root mean square over the median one's, largest head."""
    size = x.square().mean(1).sqrt()
    return float((size.amax(-1) / (size.median(-1).values + TINY)).max())
