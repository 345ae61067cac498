"""What `qattn tune` may do to a layer: a candidate as it is, or head by head where its recipe takes lists of heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from qattn_hf.methods import Method, get_method
from qattn_hf.recipe import Recipe
from qattn_kernels.layer.spec import LayerSpec

Heads = tuple[int, ...]


@dataclass(frozen=True)
class Option:
    """One way to pack one layer: a candidate's name, the heads of K and of V with 2 bits if it chooses heads, what the
    layer's tensors take, and what is expected to be lost by it."""

    candidate: str
    k_low: Heads
    v_low: Heads
    n_bytes: int
    kl: float


def by_head(recipe: Recipe) -> bool:
    """Whether a candidate leaves it open which heads get fewer bits: `bits: mixed` without lists."""
    settings: Any = recipe.settings
    sides = [getattr(settings, "bits", None), getattr(settings, "k_bits", None), getattr(settings, "v_bits", None)]
    if "k_low_heads" not in type(settings).model_fields:
        return False
    return sides == ["mixed", None, None] and {settings.n_h, settings.k_low_heads, settings.v_low_heads} == {None}


def settings_with(recipe: Recipe, lows: list[tuple[Heads, Heads]]) -> Method:
    """A head-wise candidate's settings with the 2-bit heads of K and of V of each layer."""
    lists = {f"{side}_low_heads": [list(low[i]) for low in lows] for i, side in enumerate("kv")}
    return get_method(recipe.method)(**{**recipe.settings.model_dump(exclude_unset=True), **lists})


@dataclass(frozen=True)
class Shape:
    """Layers and KV heads of a model."""

    layers: int
    heads: int

    def spec(self, recipe: Recipe, layer: int, k_low: Heads = (), v_low: Heads = ()) -> LayerSpec:
        """A layer by a candidate; computed by the reference until somebody chooses."""
        settings = recipe.settings
        if by_head(recipe):
            lows: list[tuple[Heads, Heads]] = [((), ())] * self.layers
            lows[layer] = (k_low, v_low)
            settings = settings_with(recipe, lows)
        return settings.layer_spec(layer, self.layers, self.heads)


@dataclass
class HeadLosses:
    """Of one head-wise candidate in one layer: KL with 4 bits everywhere, and with one head of K or of V at 2."""

    none: float
    k: list[float] = field(default_factory=list)
    v: list[float] = field(default_factory=list)

    def ladder(self, side: list[float]) -> Iterator[tuple[Heads, float]]:
        """The heads that mind 2 bits least, one more each time, and what they lose together beyond 4 bits.

        Errors of heads are taken to be independent, so that their losses add up; one that gains by chance counts as 0.
        """
        order = sorted(range(len(side)), key=lambda head: (side[head], head))
        more = [0.0, *accumulate(max(0.0, side[head] - self.none) for head in order)]
        for count, loss in enumerate(more):
            yield tuple(sorted(order[:count])), loss

    def combinations(self) -> Iterator[tuple[Heads, Heads, float]]:
        """2-bit heads of K and of V, and the KL that is expected."""
        for k_low, k_loss in self.ladder(self.k):
            for v_low, v_loss in self.ladder(self.v):
                yield k_low, v_low, self.none + k_loss + v_loss
