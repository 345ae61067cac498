"""A recipe for one model within a budget of bits or of KL: what `qattn tune` does.

1. Screening. All candidates stand beside a model in full precision (`compare.Beside`). One that takes no fewer bytes in
   a layer than another and errs no less in that layer's attention output is not tried there; nor is one that chooses
   heads if a smaller one does so nearly as well.
2. Sensitivity. Each candidate that is left is tried in each layer alone, the rest in full precision (`sensitivity`):
   KL to full precision is what it costs there. Candidates that choose heads are tried head by head.
3. Budget. Small errors of different layers are nearly independent, so their KLs add up; `budget.plans` finds the best
   sum for every size.
4. Check. The recipe is read end to end, on the rows that it was tuned on and on rows that it has not seen. For a budget
   in KL the plan is corrected by what was measured until it holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from qattn_hf.cache import QAttnCache
from qattn_hf.errors import QAttnError
from qattn_hf.fidelity.budget import Plan, plans, within_bytes, within_kl
from qattn_hf.fidelity.compare import Beside, Row, Told, compare, full_logits
from qattn_hf.fidelity.metrics import pareto
from qattn_hf.fidelity.observe import observed
from qattn_hf.fidelity.options import HeadLosses, Option, Shape, by_head
from qattn_hf.fidelity.sensitivity import Trial, losses
from qattn_hf.fidelity.sizes import layer_bytes, values_of
from qattn_hf.fidelity.texts import Reading
from qattn_hf.fidelity.tuned import recipe_of
from qattn_hf.recipe import Recipe
from qattn_hf.reporting import report
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import Geometry

CLEARLY = 0.95  # of another's error at most
PACKED = 0.75  # of the tokens, which every candidate must pack
ROUNDS = 5  # plans that are measured for a budget in KL
CAREFUL = 0.97  # of a budget in KL is aimed at, so that a correction does not end just above it
TINY = 1e-12


@dataclass(frozen=True)
class Budget:
    """Either bits a value of one row of `at_tokens` tokens with everything counted, or KL in nats a token."""

    bits: float | None = None
    kl: float | None = None
    at_tokens: int = 4096

    def __post_init__(self) -> None:
        if (self.bits is None) == (self.kl is None) or min(x for x in (self.bits, self.kl) if x is not None) <= 0:
            raise QAttnError(f"bits = {self.bits}, kl = {self.kl}: give one of them, above 0")


@dataclass(frozen=True)
class Tuned:
    """What was found.

    Attributes:
        recipe: to be written, or given to `patch`.
        predicted: its KL by the sum of its layers'.
        measured: row of `compare` on the rows that it was tuned on.
        checked: rows of `compare` on other rows, the recipe's first, then those of the references.
        chosen: of each layer.
        trials: one row a trial: `layer`, `candidate`, `side` and `head` that had 2 bits (no side: none of those that a
            candidate chooses), `kl` with the rest of the model in full precision.
    """

    recipe: Recipe
    predicted: float
    measured: Row
    checked: list[Row]
    chosen: list[Option]
    trials: list[Row]


class Tuner:
    """One model, its candidates and the rows that it is tuned on.

    Args:
        model: not patched; it is left as it was.
        candidates: by name.
        dtype: precision in which the model will run, for the bytes of what stays in it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        candidates: dict[str, Recipe],
        reading: Reading,
        at_tokens: int,
        dtype: torch.dtype,
        told: Told,
    ):
        if several := [name for name, recipe in candidates.items() if recipe.choices]:
            raise QAttnError(f"{several[0]} has settings by layers; a candidate is one for any layer: leave out layers")
        self.model, self.candidates, self.reading, self.told = model, candidates, reading, told
        self.at_tokens, self.dtype = at_tokens, dtype
        self.geometries: list[Geometry] = []
        self.specs: dict[str, list[LayerSpec]] = {}
        self.trials: list[Row] = []

    def screen(self) -> list[list[str]]:
        """Of each layer, the candidates that are worth a trial there."""
        self.told("screening candidates")
        beside = Beside(self.model, self.candidates, self.reading.first)
        with observed(self.model, beside):
            full_logits(self.model, self.reading.ids, self.reading)
        caches = beside.caches
        self._check_packed(caches)
        self.geometries = [layer.geometry for layer in next(iter(caches.values())).layers]
        self.specs = {name: [layer.spec for layer in cache.layers] for name, cache in caches.items()}
        self.shape = Shape(len(self.geometries), self.geometries[0].heads)
        return [self._worth(i, beside) for i in range(self.shape.layers)]

    def _check_packed(self, caches: dict[str, QAttnCache]) -> None:
        """A candidate that keeps many of a short row's tokens open would look better than it is in a long context."""
        for name, cache in caches.items():
            held = report(cache).to_dict()
            tokens = len(self.reading.ids) * self.reading.ids.shape[1]
            if held["packed_tokens"] < PACKED * tokens:
                raise QAttnError(
                    f"{name} packed {held['packed_tokens']} of {tokens} tokens, too few to judge it by: read longer "
                    "rows (--tokens), or leave it out"
                )

    def _worth(self, layer: int, beside: Beside) -> list[str]:
        """Those that nothing beats; of those that choose heads, whose trials are many, each that errs clearly less than
        any smaller one."""
        names, least = list(self.candidates), math.inf
        errors = [beside.sums[name][layer].figures()["relative_l1"] for name in names]
        sizes = [self.bytes_of(self.specs[name][layer], layer) for name in names]
        worth = set(pareto(list(zip(sizes, errors, strict=True))))
        for i in sorted(range(len(names)), key=lambda i: sizes[i]):
            if by_head(self.candidates[names[i]]):
                (worth.add if errors[i] < CLEARLY * least else worth.discard)(i)
                least = min(least, errors[i])
        return [name for i, name in enumerate(names) if i in worth]

    def bytes_of(self, spec: LayerSpec, layer: int) -> int:
        """What such a layer takes in the context of the budget."""
        return layer_bytes(spec, self.geometries[layer], self.at_tokens, self.dtype)

    def options(self, worth: list[list[str]]) -> list[list[Option]]:
        """Of each layer, what was tried and what follows from it."""
        trials: list[Trial] = []
        keys: list[tuple[int, str, str, int]] = []  # layer, candidate, side, head; no side: no head at 2 bits
        for layer, names in enumerate(worth):
            for name in names:
                recipe = self.candidates[name]
                for side, head in [("", 0), *((s, h) for s in "kv" for h in range(self.shape.heads))]:
                    if side and not by_head(recipe):
                        break
                    lows = {f"{s}_low": (head,) if s == side else () for s in "kv"}
                    spec = self.shape.spec(recipe, layer, **lows)
                    impl = self.specs[name][layer].impl
                    trials.append(Trial(layer, dataclasses.replace(spec, impl=impl)))
                    keys.append((layer, name, side, head))
        found: dict[tuple[int, str, str, int], float] = {}
        for key, loss in zip(keys, losses(self.model, trials, self.reading), strict=True):
            found[key] = loss
            self.trials.append({**dict(zip(("layer", "candidate", "side", "head"), key, strict=True)), "kl": loss})
            self.told(f"trials: {len(found)} of {len(trials)}")
        return [[o for name in names for o in self._options(i, name, found)] for i, names in enumerate(worth)]

    def _options(self, layer: int, name: str, found: dict[tuple[int, str, str, int], float]) -> list[Option]:
        recipe, none = self.candidates[name], found[layer, name, "", 0]
        if not by_head(recipe):
            return [Option(name, (), (), self.bytes_of(self.specs[name][layer], layer), none)]
        k, v = ([found[layer, name, side, head] for head in range(self.shape.heads)] for side in "kv")
        sizes: dict[tuple[int, int], int] = {}  # which heads have 2 bits does not matter to bytes
        made = []
        for k_low, v_low, kl in HeadLosses(none, k, v).combinations():
            counts = len(k_low), len(v_low)
            if counts not in sizes:
                sizes[counts] = self.bytes_of(self.shape.spec(recipe, layer, k_low, v_low), layer)
            made.append(Option(name, k_low, v_low, sizes[counts], kl))
        return made

    def values(self) -> int:
        """Keys and values of one row in the context of the budget."""
        return sum(values_of(geometry, self.at_tokens) for geometry in self.geometries)


def tune(
    model: PreTrainedModel,
    candidates: dict[str, Recipe],
    reading: Reading,
    check: Reading,
    budget: Budget,
    *,
    references: dict[str, Recipe] | None = None,
    dtype: torch.dtype | None = None,
    told: Told = lambda what: None,
) -> Tuned:
    """Find the recipe of least KL within a budget of bits, or of fewest bits within one of KL.

    Args:
        model: not patched; it is left as it was.
        candidates: what a layer may be given, by name; `bits: mixed` without lists of heads is tried head by head.
        reading: rows that decide; they are read at once. check: other rows, on which the recipe is measured.
        references: recipes that stand beside the tuned one on the rows of `check`.
        dtype: precision in which the model will run, if it is measured in another one.

    Raises:
        QAttnError: if no choice of candidates meets the budget; rows too short to judge a candidate by, or a candidate
            that has settings by layers.
    """
    dtype = dtype or model.dtype
    tuner = Tuner(model, candidates, reading, budget.at_tokens, dtype, told)
    options = tuner.options(tuner.screen())
    found = plans([[(option.n_bytes, option.kl) for option in of_layer] for of_layer in options])

    def chosen(plan: Plan) -> list[Option]:
        return [of_layer[i] for of_layer, i in zip(options, plan.picks, strict=True)]

    def measured(plan: Plan) -> tuple[Recipe, Row]:
        recipe = recipe_of(chosen(plan), candidates)
        return recipe, compare(model, {"tuned": recipe}, reading, at_tokens=budget.at_tokens, dtype=dtype, told=told)[0]

    if budget.bits is not None:
        plan = _smaller(found, budget.bits, tuner.values())
        recipe, row = measured(plan)
    else:
        assert budget.kl is not None
        plan, recipe, row = _better(found, budget.kl, measured)
    others = {"tuned": recipe, **(references or {})}
    checked = compare(model, others, check, at_tokens=budget.at_tokens, dtype=dtype, told=told)
    return Tuned(recipe, plan.kl, row, checked, chosen(plan), tuner.trials)


def _smaller(found: list[Plan], bits: float, values: int) -> Plan:
    plan = within_bytes(found, int(bits * values / 8))
    if plan is None:
        raise QAttnError(
            f"{bits} bits: the smallest choice of these candidates takes {8 * found[0].n_bytes / values:.3f} bits a "
            "value with everything counted; allow more bits or a longer context, or add smaller candidates"
        )
    return plan


def _better(found: list[Plan], kl: float, measured: Callable[[Plan], tuple[Recipe, Row]]) -> tuple[Plan, Recipe, Row]:
    """The smallest plan that was measured to hold: what layers lose together differs from the sum of what each loses
    alone, so the aim is moved by their ratio and the plan taken anew."""
    best: tuple[Plan, Recipe, Row] | None = None
    aim, tried, least = kl, set(), math.inf
    for _ in range(ROUNDS):
        plan = within_kl(found, aim) or found[-1]
        if plan in tried:
            break
        tried.add(plan)
        recipe, row = measured(plan)
        least = min(least, row["kl"])
        if row["kl"] <= kl and (best is None or plan.n_bytes < best[0].n_bytes):
            best = plan, recipe, row
        aim = plan.kl * CAREFUL * kl / max(row["kl"], TINY)
    if best is None:
        raise QAttnError(
            f"KL of {kl}: the best that was found of these candidates loses {least:.6f}; allow more, or add candidates "
            "of more bits"
        )
    return best
