"""Measure recipes on all layers at once, and their errors in each layer, during one reading of a model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf.attention.model_constants import Passes, constants
from qattn_hf.attention.observe import check_observed, packed_layers
from qattn_hf.cache.cache import QAttnCache
from qattn_hf.model.device import device_of
from qattn_hf.model.heads import head_sizes
from qattn_hf.reading.sensitivity import Trial, losses
from qattn_hf.reading.texts import Reading
from qattn_hf.recipes.recipe import Recipe, check_packs
from qattn_kernels.layout import State


class Screening:
    """Losses and errors of recipes from one reading. Each layer is judged on its full-precision inputs.

    Args:
        model: unpatched model. It is left unchanged.
        recipes: recipes by name, computed by the reference.

    Attributes:
        specs, constants: specs and constants of all layers of the model, by recipe.
        wholes: KL of each recipe on all packed layers, in nats per token. Empty until `read`.
        squares: squared errors of attention outputs by recipe and packed layer, of each KV head, fp32 `[Hkv]` on the
            CPU. Empty until `read`.

    Raises:
        UnsupportedError: the model has packed sliding windows.
    """

    def __init__(self, model: PreTrainedModel, recipes: dict[str, Recipe]):
        device, passes = device_of(model).type, Passes()
        self.model, self.names = model, list(recipes)
        self.specs: dict[str, list[Any]] = {}
        self.constants: dict[str, list[State]] = {}
        for name, recipe in recipes.items():
            found = recipe.for_model(model.config)
            check_packs(found)
            self.specs[name] = found.layer_specs(model.config, device)
            check_observed(QAttnCache(self.specs[name], found, None, device))
            self.constants[name] = constants(model, self.specs[name], passes)
        self.heads = {i: head_sizes(model.config, i).kv for i in packed_layers(model)}
        self.wholes: dict[str, float] = {}
        self.squares: dict[str, dict[int, torch.Tensor]] = {name: {} for name in recipes}

    def read(self, reading: Reading) -> None:
        """Measure the recipes on rows of text."""
        trials = [[Trial(i, self.specs[name][i], self.constants[name][i]) for i in self.heads] for name in self.names]
        self.wholes = dict(zip(self.names, losses(self.model, trials, reading, self._add), strict=True))
        self.squares = {name: self._on_cpu(of_recipe) for name, of_recipe in self.squares.items()}

    def _add(self, recipe: int, layer: int, error: torch.Tensor) -> None:
        """Add the squared error of some tokens. Does not wait for the device."""
        if layer not in self.heads:
            return  # it reads the keys and values of a packed layer
        square = error.float().square().sum((0, 1, 3)).view(self.heads[layer], -1).sum(1)
        squares = self.squares[self.names[recipe]]
        squares[layer] = squares[layer] + square if layer in squares else square

    def _on_cpu(self, squares: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Move a recipe's squares to the CPU. Waits for the device once, not once for each layer."""
        device = device_of(self.model)
        moved = torch.cat([squares[i].to(device) for i in self.heads]).cpu()
        return dict(zip(self.heads, moved.split(list(self.heads.values())), strict=True))
