"""Compute packed outputs of many layers at once with the reference, from full-precision inputs.

The reference consists of a few hundred small operations, independent of the number of rows and heads. So layers with
the same spec and shape become rows or heads of one packed layer. Each operation then runs once for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from qattn_hf.attention.observe import Call
from qattn_hf.layer.layer import QAttnLayer
from qattn_kernels.formats.traits import mixes
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import needs_constants
from qattn_kernels.layout import State

HEADS_DIM = {"k.equalizer": 1, "k.compensation": 0, "k.static": 0, "v.static": 0}  # of constants, which have no rows


class Member(NamedTuple):
    """One packed layer.

    Attributes:
        layer: index of the layer in the model, whose calls it gets.
        spec: how it is packed, computed by the reference.
        constants: the layer's constants from the model (`model_constants`).
    """

    layer: int
    spec: LayerSpec
    constants: State


class Stack:
    """Members of one spec and shape in one packed layer.

    Members are rows of the packed layer. Constants of the model and learned sinks have no rows, so members with
    constants or sinks become heads. A setting that compares the heads of a layer then has a stack for itself.
    """

    def __init__(self, members: Sequence[int], known: Sequence[Member], by_heads: bool, device_type: str, tokens: int):
        self.members, self.at = members, [known[i].layer for i in members]
        self.dim = 1 if by_heads else 0
        # a layer that grows waits for the device and copies its tensors, at nearly every call
        self.packed = QAttnLayer(known[members[0]].spec, tokens, device_type)
        first = known[members[0]].constants
        self.packed.constants = {
            name: torch.cat([known[i].constants[name] for i in members], HEADS_DIM[name]) for name in first
        }

    def outputs(self, calls: Mapping[int, Call]) -> dict[int, torch.Tensor]:
        """Return the next output `[B, T, Hq, Dv]` of each member, by its index in the whole list.

        Args:
            calls: by layer, the next call of every layer that has members.
        """
        parts = [calls[layer] for layer in self.at]
        tokens = parts[0].query.shape[2]
        query, keys, values = (
            torch.cat([x[:, :, -tokens:] for x in of_layers], self.dim)
            for of_layers in zip(*((call.query, call.keys, call.values) for call in parts), strict=True)
        )
        scores = parts[0].scores
        if sinks := [part.scores.sinks for part in parts if part.scores.sinks is not None]:
            scores = scores._replace(sinks=torch.cat(sinks))
        out = parts[0]._replace(query=query, keys=keys, values=values, scores=scores).packed_out(self.packed)
        return dict(zip(self.members, out.chunk(len(parts), 2 if self.dim else 0), strict=True))


class StackedLayers:
    """Packed layers of any specs, fed with the calls of a model in full precision.

    Args:
        members: the layers.
        device_type: type of the model's device.
        tokens: most tokens of a row in all calls together.
    """

    def __init__(self, members: Sequence[Member], device_type: str, tokens: int):
        self.members, self.device_type, self.tokens = members, device_type, tokens
        self.stacks: list[Stack] | None = None

    def outputs(self, calls: Mapping[int, Call]) -> list[torch.Tensor]:
        """Return the output `[B, T, Hq, Dv]` of each member, in order.

        Args:
            calls: by layer, the next call of every layer that has members. All are calls of one step of the model.
        """
        if self.stacks is None:
            self.stacks = self._stacks(calls)
        found = {i: out for stack in self.stacks for i, out in stack.outputs(calls).items()}
        return [found[i] for i in range(len(self.members))]

    def _stacks(self, calls: Mapping[int, Call]) -> list[Stack]:
        alike: dict[tuple[Any, ...], list[int]] = {}
        for i, (layer, spec, _) in enumerate(self.members):
            call = calls[layer]
            by_heads = needs_constants(spec) or call.scores.sinks is not None
            alone = by_heads and (mixes(spec.k) or mixes(spec.v))
            shape = (*call.query.shape[1::2], *call.keys.shape[1::2], call.values.shape[-1])
            sinks = call.scores.sinks is not None
            key = (by_heads, sinks, spec, shape, call.scores._replace(sinks=None), i if alone else None)
            alike.setdefault(key, []).append(i)
        return [Stack(part, self.members, key[0], self.device_type, self.tokens) for key, part in alike.items()]
