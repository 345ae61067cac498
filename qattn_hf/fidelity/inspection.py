"""Collect statistics of a model's queries, keys and values, and a recipe's sinks and bits, for `qattn inspect`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf.attention.observe import Call, attention_mass, check_observed, observed, packed_layers
from qattn_hf.cache.cache import QAttnCache
from qattn_hf.cache.reporting import report
from qattn_hf.errors import QAttnError
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.model.device import device_of
from qattn_hf.reading.chunks import cuts, feed
from qattn_hf.recipes.recipe import Recipe
from qattn_kernels.formats.flashq.reference import head_priority

CHUNK = 256  # tokens whose attention weights are built at once


@dataclass
class Inspected:
    """Statistics of one layer over one row of `S` tokens. Tensors are fp32 on the CPU.

    Attributes:
        layer: index of the layer in the model.
        ranges: for `query` `[Hq, D]`, `key` and `value` `[Hkv, D]`: minimum and maximum of each channel.
        channel_gaps: for `key` and `value` `[Hkv, D]`: maximum minus minimum of each channel over all tokens.
        token_gaps: for `key` and `value` `[Hkv, S]`: maximum minus minimum of each token over its channels.
        mass: `[Hkv, S]`, mean attention weight of a token over the queries that can see it.
        key_norms: `[Hkv, S]`, L1 norm of each key. SinkQ selects sinks by this norm.
        held: for each KV head, the tokens that the recipe's sink pool keeps unquantized at the end, including its
            window of evicted sinks.
        priorities: for `key` and `value` `[Hkv]`: TurboAttention's priority of each head (section 3.2).
        bits: for `key` and `value`: bits per quantized value of each head, as the recipe chose them.
    """

    layer: int
    ranges: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    channel_gaps: dict[str, torch.Tensor] = field(default_factory=dict)
    token_gaps: dict[str, torch.Tensor] = field(default_factory=dict)
    mass: torch.Tensor = field(default_factory=lambda: torch.zeros(1, 0, dtype=torch.float32, device="cpu"))
    key_norms: torch.Tensor = field(default_factory=lambda: torch.zeros(1, 0, dtype=torch.float32, device="cpu"))
    held: list[list[int]] = field(default_factory=list)
    priorities: dict[str, torch.Tensor] = field(default_factory=dict)
    bits: dict[str, list[int]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as plain data, with `mass` and `key_norms` of each head's ten most attended tokens."""
        top = self.mass.topk(min(10, self.mass.shape[1]))
        return {
            "layer": self.layer,
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
    """Read one row through a model in full precision, and feed the same calls to a packed cache of the recipe.

    Args:
        model: unpatched model. It is left unchanged.
        recipe: recipe whose sink pool and bits are shown, as `compare.find_recipe` makes it.
        ids: int64 `[1, S]`.

    Returns:
        One `Inspected` for each packed layer.

    Raises:
        QAttnError: there is more than one row, or the recipe packed nothing of the row.
    """
    if ids.shape[0] != 1:
        raise QAttnError(f"{ids.shape[0]} rows: inspect looks at one")
    cache, recorder = QAttnCache.for_model(model, recipe=recipe), Recorder(packed_layers(model), ids.shape[1])
    check_observed(cache)
    with observed(model, lambda call: recorder.record(call, cache.layers[call.layer])):
        for _ in feed(model, ids.to(device_of(model)), cuts(ids.shape[1], CHUNK)):
            pass
    rows = report(cache).to_dict()
    if not rows["packed_tokens"]:
        raise QAttnError(f"{recipe.origin} packed nothing of {ids.shape[1]} tokens: read a longer row")
    for i, layer in recorder.layers.items():
        bits = rows["layers"][i]["bits_per_head"]
        layer.bits = {name: bits[name[0]][0] for name in ("key", "value")}
        layer.held = held_tokens(cache.layers[i])
    return list(recorder.layers.values())


class Recorder:
    """Collects the statistics of each layer from its calls. The last call has all keys and values."""

    def __init__(self, layers: list[int], tokens: int):
        self.tokens, self.layers = tokens, {i: Inspected(i) for i in layers}

    def record(self, call: Call, packed: QAttnLayer) -> None:
        """Record a call, and feed it to the packed layer as well."""
        call.packed_out(packed)
        layer, query = self.layers[call.layer], call.query[0].float().cpu()
        low, high = query.amin(1), query.amax(1)
        if "query" in layer.ranges:
            low, high = torch.minimum(low, layer.ranges["query"][0]), torch.maximum(high, layer.ranges["query"][1])
        layer.ranges["query"] = (low, high)
        mass = attention_mass(call)
        mass[:, : layer.mass.shape[-1]] += layer.mass
        layer.mass = mass
        if call.keys.shape[2] == self.tokens:
            _finish(layer, call)


def _finish(layer: Inspected, call: Call) -> None:
    """Fill in the statistics that need all keys and values, from the last call."""
    sides = {"key": call.keys[0].float().cpu(), "value": call.values[0].float().cpu()}
    for name, x in sides.items():
        low, high = x.amin(1), x.amax(1)
        layer.ranges[name] = (low, high)
        layer.channel_gaps[name] = high - low
        layer.token_gaps[name] = x.amax(-1) - x.amin(-1)
        keep, scale = x.new_ones(1, *x.shape[:2], dtype=torch.bool), x.new_ones(1, len(x))
        layer.priorities[name] = head_priority(x[None], scale, keep, "priority")[0]
    layer.key_norms = sides["key"].abs().sum(-1)
    tokens = layer.mass.shape[1]
    seen_by = torch.arange(tokens, 0, -1, device=layer.mass.device)  # a token is seen by itself and all later queries
    layer.mass = layer.mass / seen_by


def held_tokens(layer: QAttnLayer) -> list[list[int]]:
    """Return the tokens that the sink pool and its window keep unquantized, for each KV head of the first row."""
    if not layer.spec.sink_pool.num:
        return [[] for _ in range(layer.geometry.heads)]
    state = layer.state
    in_pool = (state["sink.born"][0] > 0) & (state["sink.written"][0] == 0)
    return [sorted(pos[mask].tolist()) for pos, mask in zip(state["sink.pos"][0], in_pool, strict=True)]
