"""What a model's queries, keys and values are like, and what a recipe makes of them: what `qattn inspect` shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf.cache import QAttnCache
from qattn_hf.chunks import cuts, feed
from qattn_hf.device import device_of
from qattn_hf.errors import QAttnError
from qattn_hf.fidelity.observe import Call, observed
from qattn_hf.layer import QAttnLayer
from qattn_hf.recipe import Recipe
from qattn_hf.reporting import report
from qattn_kernels.formats.flashq.reference import head_priority

CHUNK = 256  # tokens whose attention weights are built at once


@dataclass
class Inspected:
    """One layer on one row of `S` tokens, on the CPU in fp32.

    Attributes:
        ranges: of `query` `[Hq, D]`, `key` and `value` `[Hkv, D]`: smallest and largest number of each channel.
        channel_gaps: of `key` and `value` `[Hkv, D]`, largest less smallest number of a channel over all tokens.
        token_gaps: the same of a token over its channels, `[Hkv, S]`.
        mass: `[Hkv, S]`, what a token gets of the attention weights of the queries that see it, their mean.
        key_norms: `[Hkv, S]`, sum of the magnitudes of a key, by which SinkQ chooses.
        held: of each KV head, the tokens that the recipe's pool keeps out of the codes at the end, those that left it
            for the window of evicted sinks included.
        priorities: of `key` and `value` `[Hkv]`, TurboAttention's (section 3.3), over all tokens.
        bits: the same, code bits that the recipe gave the heads.
    """

    ranges: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    channel_gaps: dict[str, torch.Tensor] = field(default_factory=dict)
    token_gaps: dict[str, torch.Tensor] = field(default_factory=dict)
    mass: torch.Tensor = field(default_factory=lambda: torch.zeros(1, 0))
    key_norms: torch.Tensor = field(default_factory=lambda: torch.zeros(1, 0))
    held: list[list[int]] = field(default_factory=list)
    priorities: dict[str, torch.Tensor] = field(default_factory=dict)
    bits: dict[str, list[int]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Numbers for programs; token by token only the ten that get most attention in each head."""
        top = self.mass.topk(min(10, self.mass.shape[1]))
        return {
            "ranges": {name: [low.tolist(), high.tolist()] for name, (low, high) in self.ranges.items()},
            "channel_gaps": {name: gaps.tolist() for name, gaps in self.channel_gaps.items()},
            "most_attended": [
                [
                    {"token": t, "mass": m, "key_norm": self.key_norms[head, t].item(), "held": t in self.held[head]}
                    for t, m in zip(tokens, masses, strict=True)
                ]
                for head, (tokens, masses) in enumerate(zip(top.indices.tolist(), top.values.tolist(), strict=True))
            ],
            "held": self.held,
            "priorities": {name: values.tolist() for name, values in self.priorities.items()},
            "bits": self.bits,
        }


def inspect(model: PreTrainedModel, recipe: Recipe, ids: torch.Tensor) -> list[Inspected]:
    """Every layer of a model in full precision on one row `[1, S]`, with a packed cache of the recipe beside it.

    Raises:
        QAttnError: if the recipe packed nothing of the row.
    """
    if ids.shape[0] != 1:
        raise QAttnError(f"{ids.shape[0]} rows: inspect looks at one")
    cache, seen = QAttnCache.for_model(model, recipe=recipe), Looked(ids.shape[1])
    with observed(model, lambda call: seen.look(call, cache.layers[call.layer])):
        for _ in feed(model, ids.to(device_of(model)), cuts(ids.shape[1], CHUNK)):
            pass
    rows = report(cache).to_dict()
    if not rows["packed_tokens"]:
        raise QAttnError(f"{recipe.origin} packed nothing of {ids.shape[1]} tokens: read a longer row")
    for i, (found, row) in enumerate(zip(seen.layers, rows["layers"], strict=True)):
        found.bits = {name: row["bits_per_head"][name[0]][0] for name in ("key", "value")}
        found.held = held_tokens(cache.layers[i])
    return seen.layers


class Looked:
    """Gathers layers from their calls; the last call has all keys and values."""

    def __init__(self, tokens: int):
        self.tokens, self.layers = tokens, list[Inspected]()

    def look(self, call: Call, packed: QAttnLayer) -> None:
        """Note a call, and let the packed layer have it too."""
        call.packed_out(packed)
        if call.layer == len(self.layers):
            self.layers.append(Inspected())
        found, query = self.layers[call.layer], call.query[0].float().cpu()
        low, high = query.amin(1), query.amax(1)
        if "query" in found.ranges:
            low, high = torch.minimum(low, found.ranges["query"][0]), torch.maximum(high, found.ranges["query"][1])
        found.ranges["query"] = (low, high)
        mass = attention_mass(call)
        mass[:, : found.mass.shape[-1]] += found.mass
        found.mass = mass
        if call.keys.shape[2] == self.tokens:
            _finish(found, call)


def _finish(found: Inspected, call: Call) -> None:
    sides = {"key": call.keys[0].float().cpu(), "value": call.values[0].float().cpu()}
    for name, x in sides.items():
        low, high = x.amin(1), x.amax(1)
        found.ranges[name] = (low, high)
        found.channel_gaps[name] = high - low
        found.token_gaps[name] = x.amax(-1) - x.amin(-1)
        keep, scale = torch.ones(1, *x.shape[:2], dtype=torch.bool), torch.ones(1, len(x))
        found.priorities[name] = head_priority(x[None], scale, keep, "priority")[0]
    found.key_norms = sides["key"].abs().sum(-1)
    tokens = found.mass.shape[1]
    found.mass = found.mass / torch.arange(tokens, 0, -1)  # queries that see a token: itself and all later ones


def attention_mass(call: Call) -> torch.Tensor:
    """`[Hkv, S]`: the weights that the call's queries of one row give to each token, mean over the heads of a group."""
    query, keys = call.query[0].float(), call.keys[0].float()
    heads, tokens, size = keys.shape[0], query.shape[1], keys.shape[1]
    grouped = query.view(heads, -1, *query.shape[1:])  # [Hkv, G, T, D]
    s = grouped @ keys[:, None].mT * call.scores.scale
    if call.scores.softcap:
        s = call.scores.softcap * torch.tanh(s / call.scores.softcap)
    seen = torch.ones(tokens, size, dtype=torch.bool, device=s.device).tril(size - tokens)
    s = s.masked_fill(~seen, -torch.inf)
    if call.scores.sinks is not None:  # a weight that no token gets
        extra = call.scores.sinks.view(heads, -1, 1, 1).expand(*s.shape[:3], 1)
        return torch.cat([s, extra], -1).softmax(-1)[..., :-1].mean(1).sum(1).cpu()
    return s.softmax(-1).mean(1).sum(1).cpu()


def held_tokens(layer: QAttnLayer) -> list[list[int]]:
    """Of each KV head of the first row, the tokens that a sink pool and its window keep out of the codes."""
    if not layer.spec.sink_pool.num:
        return [[] for _ in range(layer.geometry.heads)]
    state = layer.state
    there = (state["sink.born"][0] > 0) & (state["sink.written"][0] == 0)
    return [sorted(pos[kept].tolist()) for pos, kept in zip(state["sink.pos"][0], there, strict=True)]
