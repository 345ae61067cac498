"""Measure the errors of all candidates in all layers during one reading of a model in full precision."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf.attention.model_constants import Passes, constants
from qattn_hf.attention.observe import Call, check_observed, observed, packed_layers
from qattn_hf.cache.cache import QAttnCache
from qattn_hf.model.device import device_of
from qattn_hf.reading.chunks import feed
from qattn_hf.reading.metrics import AttentionSums
from qattn_hf.reading.stacked import Member, StackedLayers
from qattn_hf.reading.texts import Reading
from qattn_hf.recipes.recipe import Recipe, check_packs
from qattn_kernels.layout import Geometry, State


class Screening:
    """Errors and sizes of recipes from one reading. Each layer is judged on its full-precision inputs.

    Args:
        model: unpatched model. It is left unchanged.
        recipes: recipes by name, computed by the reference.
        reading: rows of text, read at once.

    Attributes:
        specs, constants: specs and constants of all layers of the model, by recipe.
        sums: errors of attention outputs by recipe and packed layer.
        squares: the same errors squared, of each KV head, fp64 `[Hkv]`.
        places: recipe and layer of everything that is read together, in order.
        packed: for each recipe, the packed tokens of all rows in the layer that packed fewest.
        geometries: geometry of each packed layer with these rows.

    Raises:
        UnsupportedError: the model has packed sliding windows.
    """

    def __init__(self, model: PreTrainedModel, recipes: dict[str, Recipe], reading: Reading):
        device, layers, passes = device_of(model).type, packed_layers(model), Passes()
        self.specs: dict[str, list[Any]] = {}
        self.constants: dict[str, list[State]] = {}
        for name, recipe in recipes.items():
            found = recipe.for_model(model.config)
            check_packs(found)
            self.specs[name] = found.layer_specs(model.config, device)
            check_observed(QAttnCache(self.specs[name], found, None, device))
            self.constants[name] = constants(model, self.specs[name], passes)
        self.sums = {name: {i: AttentionSums() for i in layers} for name in recipes}
        self.squares: dict[str, dict[int, torch.Tensor]] = {name: {} for name in recipes}
        self.places = [(name, i) for name in recipes for i in layers]
        members = [Member(i, self.specs[name][i], self.constants[name][i]) for name, i in self.places]
        stacked = StackedLayers(members, device)
        self._read(model, reading, stacked)
        self.packed: dict[str, int] = {}
        for (name, _), tokens in zip(self.places, stacked.packed_tokens(), strict=True):
            self.packed[name] = min(tokens, self.packed.get(name, tokens))

    def _read(self, model: PreTrainedModel, reading: Reading, stacked: StackedLayers) -> None:
        calls: dict[int, Call] = {}
        with observed(model, lambda call: calls.update({call.layer: call})):
            for chunk in feed(model, reading.ids.to(device_of(model)), reading.at, unscored=len(reading.ids[0])):
                skip = max(0, reading.first - chunk.start)
                for (name, layer), out in zip(self.places, stacked.outputs(calls), strict=True):
                    if skip < out.shape[1]:
                        self._add(name, calls[layer], out, skip)
        self.geometries = {i: _geometry(call) for i, call in calls.items()}

    def _add(self, name: str, call: Call, out: torch.Tensor, skip: int) -> None:
        """Add a member's output, without the first `skip` tokens."""
        self.sums[name][call.layer].add(call.out[:, skip:], out[:, skip:])
        square = (out - call.out)[:, skip:].double().square().sum((0, 1, 3)).unflatten(0, (call.keys.shape[1], -1))
        before = self.squares[name].get(call.layer)
        self.squares[name][call.layer] = square.sum(1) if before is None else before + square.sum(1)


def _geometry(call: Call) -> Geometry:
    batch, heads, _, k_dim = call.keys.shape
    return Geometry(batch, heads, k_dim, call.values.shape[-1], 1, call.keys.dtype)
