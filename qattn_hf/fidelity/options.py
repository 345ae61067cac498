"""Options of `qattn tune` for a layer: a candidate recipe, and the 2-bit heads if the candidate chooses heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from qattn_hf.methods import Method, get_method
from qattn_hf.recipes.recipe import Recipe
from qattn_kernels.layer.spec import LayerSpec

Heads = tuple[int, ...]


@dataclass(frozen=True)
class Option:
    """One way to pack one layer.

    Attributes:
        layer: index of the layer in the model.
        candidate: name of the recipe.
        k_low, v_low: 2-bit heads of K and of V, if the candidate chooses heads.
        n_bytes: bytes of the layer's tensors.
        kl: expected KL to full precision, in nats per token.
    """

    layer: int
    candidate: str
    k_low: Heads
    v_low: Heads
    n_bytes: int
    kl: float


def by_head(recipe: Recipe) -> bool:
    """Return whether 2-bit heads of a candidate are to be chosen: `bits: mixed` without lists or numbers of heads."""
    settings: Any = recipe.settings
    sides = [getattr(settings, "bits", None), getattr(settings, "k_bits", None), getattr(settings, "v_bits", None)]
    if "k_low_heads" not in type(settings).model_fields:
        return False
    return sides == ["mixed", None, None] and {settings.n_h, settings.k_low_heads, settings.v_low_heads} == {None}


def settings_with(recipe: Recipe, lows: list[tuple[Heads, Heads]]) -> Method:
    """Return the settings of a head-wise candidate with these 2-bit heads of K and of V for each layer."""
    lists = {f"{side}_low_heads": [list(low[i]) for low in lows] for i, side in enumerate("kv")}
    return get_method(recipe.method)(**{**recipe.settings.model_dump(exclude_unset=True), **lists})


@dataclass(frozen=True)
class Shape:
    """Number of layers of a model, and the number of KV heads of each packed layer by its index."""

    layers: int
    heads: dict[int, int]

    def spec(self, recipe: Recipe, layer: int, k_low: Heads = (), v_low: Heads = ()) -> LayerSpec:
        """Make the spec of one layer for a candidate, with `impl="reference"`. 2-bit heads need a head-wise
        candidate."""
        settings = recipe.settings
        if by_head(recipe):
            lows: list[tuple[Heads, Heads]] = [((), ())] * self.layers
            lows[layer] = (k_low, v_low)
            settings = settings_with(recipe, lows)
        return settings.layer_spec(layer, self.layers, self.heads[layer])


@dataclass
class HeadLosses:
    """KL of a head-wise candidate in one layer.

    `none` is the KL with 4 bits in every head. `k` and `v` have the KL with one head of K or of V at 2 bits."""

    none: float
    k: list[float] = field(default_factory=list)
    v: list[float] = field(default_factory=list)

    def ladder(self, side: list[float]) -> Iterator[tuple[Heads, float]]:
        """Yield sets of 2-bit heads of one side, whose KLs `side` has, with their expected loss beyond 4 bits.

        The first set is empty, and each further set adds the head that loses least among the others.

        Errors of heads are assumed to be independent, so losses add up. A gain counts as 0.
        """
        order = sorted(range(len(side)), key=lambda head: (side[head], head))
        more = [0.0, *accumulate(max(0.0, side[head] - self.none) for head in order)]
        for count, loss in enumerate(more):
            yield tuple(sorted(order[:count])), loss

    def combinations(self) -> Iterator[tuple[Heads, Heads, float]]:
        """Yield pairs of sets of 2-bit heads of K and of V, with the expected KL."""
        for k_low, k_loss in self.ladder(self.k):
            for v_low, v_loss in self.ladder(self.v):
                yield k_low, v_low, self.none + k_loss + v_loss
