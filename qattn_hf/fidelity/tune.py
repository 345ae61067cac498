"""Find a recipe for one model within a budget of bits or of KL, for `qattn tune`.

Unpacked layers stay unchanged. Layers, bytes and bits below count only packed layers.

1. Screening. All candidates read what a model in full precision reads (`screening`). A layer drops a candidate if
   another one needs no more bytes and has no larger error of the attention output. It also drops a candidate that
   chooses heads if a smaller candidate of this kind is nearly as good.
2. Sensitivity. Candidates of least and of largest error are tried in each layer alone, the rest in full precision
   (`sensitivity`). Their loss in that layer is the KL to full precision. The losses of other candidates follow from
   their errors (`estimate`). Candidates that choose heads are tried head by head.
3. Budget. Small errors of different layers are nearly independent, so their KLs add up. `budget.plans` finds the best
   sum for every size.
4. Check. The recipe is measured end to end, on the rows that it was tuned on and on other rows. For a budget in KL, the
   measured KL corrects the plan until it holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from qattn_hf.attention.observe import packed_layers
from qattn_hf.cache.sizes import layer_bytes, values_of
from qattn_hf.errors import QAttnError
from qattn_hf.fidelity.budget import Plan, plans, within_bytes, within_kl
from qattn_hf.fidelity.compare import Progress, Row, compare
from qattn_hf.fidelity.estimate import anchors, estimated, fewer
from qattn_hf.fidelity.options import HeadLosses, Option, Shape, by_head, settings_with
from qattn_hf.fidelity.screening import Screening
from qattn_hf.fidelity.tuned import recipe_of
from qattn_hf.model.heads import head_sizes
from qattn_hf.patching import warm
from qattn_hf.reading.metrics import pareto
from qattn_hf.reading.sensitivity import Trial, losses
from qattn_hf.reading.texts import Reading
from qattn_hf.recipes.recipe import Recipe
from qattn_kernels.layer.spec import LayerSpec

CLEARLY = 0.95  # an error counts as clearly smaller up to this share of another error
MIN_PACKED = 0.75  # share of the tokens that every candidate must pack
ROUNDS = 5  # plans that are measured for a budget in KL
MARGIN = 0.97  # share of a budget in KL that a correction aims at, so the result does not end just above the budget
TINY = 1e-12
HeadKey = tuple[str, str, int]  # candidate, side, head; an empty side: no head has 2 bits


@dataclass(frozen=True)
class Budget:
    """A budget for `tune`: either `bits` or `kl`.

    Attributes:
        bits: bits per cached value of one row of `at_tokens` tokens, every tensor counted.
        kl: KL to full precision in nats per token.
        at_tokens: context length for which bytes are counted.

    Raises:
        QAttnError: neither or both are given, or the given one is not above 0.
    """

    bits: float | None = None
    kl: float | None = None
    at_tokens: int = 4096

    def __post_init__(self) -> None:
        if (self.bits is None) == (self.kl is None) or min(x for x in (self.bits, self.kl) if x is not None) <= 0:
            raise QAttnError(f"bits = {self.bits}, kl = {self.kl}: give one of them, above 0")


@dataclass(frozen=True)
class Tuned:
    """Result of `tune`.

    Attributes:
        recipe: the recipe, for `patch(model, recipe=...)`. `recipe.as_yaml()` returns a recipe file.
        predicted: sum of the layers' KLs, in nats per token.
        measured: row of `compare` for the recipe, on the rows that it was tuned on.
        checked: rows of `compare` on other rows: for the recipe, then for the references.
        chosen: the option chosen for each packed layer.
        trials: one row for each candidate of each layer. `kl` is its loss with the rest of the model in full precision.
            `measured` is false if `kl` is estimated from an error. `side` and `head` name the one 2-bit head (empty: no
            head has 2 bits).
    """

    recipe: Recipe
    predicted: float
    measured: Row
    checked: list[Row]
    chosen: list[Option]
    trials: list[Row]


def check_candidates(candidates: dict[str, Recipe]) -> None:
    """Refuse candidates that differ by layer, which cannot be tried in one layer alone. This needs no model.

    Args:
        candidates: recipes by name.

    Raises:
        QAttnError: a candidate has `layers`. The message names it and what to leave out.
    """
    for name, recipe in candidates.items():
        if recipe.choices:
            raise QAttnError(f"{name} has settings by layers; a candidate is one for any layer: leave out layers")


def by_reference(recipe: Recipe) -> Recipe:
    """Return the recipe computed by the reference, without family defaults, as `recipe_of` returns it."""
    return dataclasses.replace(
        recipe, settings=recipe.settings.model_copy(update={"impl": "reference"}), by_family=False
    )


def _variant(name: str, side: str) -> str:
    """Return the name of a candidate with 2 bits in all heads of one side, or in no heads."""
    return f"{name}, 2 bits in {side or 'no'} heads"


class Tuner:
    """The steps of `tune` for one model: screening of candidates, and trials.

    Args:
        model: unpatched model. It is left unchanged.
        candidates: recipes by name.
        reading: rows of text that decide.
        at_tokens: context length for which bytes are counted.
        dtype: precision in which the model will run. Unquantized tensors of a cache are counted in it.
        progress: called with a text before each step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        candidates: dict[str, Recipe],
        reading: Reading,
        at_tokens: int,
        dtype: torch.dtype,
        progress: Progress,
    ):
        check_candidates(candidates)
        # use the reference: compiling kernels for every candidate takes longer than the trials
        self.candidates = {name: by_reference(recipe) for name, recipe in candidates.items()}
        self.model, self.progress = model, progress
        self.reading = Reading(reading.ids, fewer(reading.at, reading.first), reading.first, reading.batch)
        self.at_tokens, self.dtype = at_tokens, dtype
        self.layers = packed_layers(model)
        heads = {i: head_sizes(model.config, i).kv for i in self.layers}
        self.shape = Shape(model.config.get_text_config(decoder=True).num_hidden_layers, heads)
        self.trials: list[Row] = []

    def screen(self) -> list[list[str]]:
        """Return the names of the candidates to try in each packed layer."""
        self.progress("screening candidates")
        self.screened = Screening(self.model, {**self.candidates, **self._by_head()}, self.reading)
        self._check_packed()
        return [self._candidates_of(i) for i in self.layers]

    def _by_head(self) -> dict[str, Recipe]:
        """Make three recipes for each candidate that chooses heads: 4 bits in all heads, 2 bits in K, 2 bits in V."""
        every = [tuple(range(self.shape.heads.get(i, 0))) for i in range(self.shape.layers)]
        found = {}
        for name, recipe in self.candidates.items():
            for side in ("", "k", "v") if by_head(recipe) else ():
                lows = [(low if side == "k" else (), low if side == "v" else ()) for low in every]
                found[_variant(name, side)] = dataclasses.replace(recipe, settings=settings_with(recipe, lows))
        return found

    def _check_packed(self) -> None:
        """Refuse a candidate that leaves many tokens of a short row unquantized: a long context would lose more."""
        tokens = self.reading.ids.numel()
        for name, packed in self.screened.packed.items():
            if packed < MIN_PACKED * tokens:
                raise QAttnError(
                    f"{name} packed {packed} of {tokens} tokens, too few to judge it by: read longer "
                    "rows (--tokens), or leave it out"
                )

    def _candidates_of(self, layer: int) -> list[str]:
        """Return the candidates on the Pareto front of bytes and error in a layer.

        Candidates that choose heads need many trials. One is kept only if its error is clearly smaller than any smaller
        candidate's error."""
        names, least = list(self.candidates), math.inf
        errors = [self.screened.sums[name][layer].figures()["relative_l1"] for name in names]
        sizes = [self.bytes_of(self.screened.specs[name][layer], layer) for name in names]
        front = set(pareto(list(zip(sizes, errors, strict=True))))
        for i in sorted(range(len(names)), key=lambda i: sizes[i]):
            if by_head(self.candidates[names[i]]):
                (front.add if errors[i] < CLEARLY * least else front.discard)(i)
                least = min(least, errors[i])
        return [name for i, name in enumerate(names) if i in front]

    def bytes_of(self, spec: LayerSpec, layer: int) -> int:
        """Return the bytes of a layer with this spec at `at_tokens` tokens."""
        return layer_bytes(spec, self.screened.geometries[layer], self.at_tokens, self.dtype)

    def options(self, candidates: list[list[str]]) -> list[list[Option]]:
        """Try some candidates of each packed layer. Returns the options of each layer, with bytes and expected KL."""
        errors = {
            layer: {key: self._error(layer, *key) for name in names for key in self._keys(layer, name)}
            for layer, names in zip(self.layers, candidates, strict=True)
        }
        tried = [(layer, key) for layer, of_layer in errors.items() for key in anchors(of_layer)]
        measured: dict[int, dict[HeadKey, float]] = {layer: {} for layer in self.layers}
        trials = [self._trial(layer, *key) for layer, key in tried]
        for n, ((layer, key), loss) in enumerate(zip(tried, losses(self.model, trials, self.reading), strict=True)):
            measured[layer][key] = loss
            self.progress(f"trials: {n + 1} of {len(trials)}")
        found = []
        for layer, names in zip(self.layers, candidates, strict=True):
            loss_of = estimated(errors[layer], measured[layer])
            for key, loss in loss_of.items():
                row = dict(zip(("candidate", "side", "head"), key, strict=True))
                self.trials.append({"layer": layer, **row, "kl": loss, "measured": key in measured[layer]})
            found.append([option for name in names for option in self._options(layer, name, loss_of)])
        return found

    def _keys(self, layer: int, name: str) -> list[HeadKey]:
        """Return what can be tried of a candidate in a layer: no head at 2 bits, and each single head at 2 bits."""
        heads = range(self.shape.heads[layer]) if by_head(self.candidates[name]) else ()
        return [(name, "", 0), *((name, side, head) for side in "kv" for head in heads)]

    def _error(self, layer: int, name: str, side: str, head: int) -> float:
        """Return the squared error of a layer's attention output. A 2-bit head changes only the error of that head."""
        squares = self.screened.squares
        if not by_head(self.candidates[name]):
            return float(squares[name][layer].sum())
        of_heads = squares[_variant(name, "")][layer].clone()
        if side:
            of_heads[head] = squares[_variant(name, side)][layer][head]
        return float(of_heads.sum())

    def _trial(self, layer: int, name: str, side: str, head: int) -> Trial:
        lows = {f"{s}_low": (head,) if s == side else () for s in "kv"}
        constants = self.screened.constants[name][layer]
        return Trial(layer, self.shape.spec(self.candidates[name], layer, **lows), constants)

    def _options(self, layer: int, name: str, loss_of: dict[HeadKey, float]) -> list[Option]:
        recipe, none = self.candidates[name], loss_of[name, "", 0]
        if not by_head(recipe):
            return [Option(layer, name, (), (), self.bytes_of(self.screened.specs[name][layer], layer), none)]
        k, v = ([loss_of[name, side, head] for head in range(self.shape.heads[layer])] for side in "kv")
        sizes: dict[tuple[int, int], int] = {}  # bytes depend only on the number of 2-bit heads
        options = []
        for k_low, v_low, kl in HeadLosses(none, k, v).combinations():
            counts = len(k_low), len(v_low)
            if counts not in sizes:
                sizes[counts] = self.bytes_of(self.shape.spec(recipe, layer, k_low, v_low), layer)
            options.append(Option(layer, name, k_low, v_low, sizes[counts], kl))
        return options

    def values(self) -> int:
        """Return the number of cached values of one row of `at_tokens` tokens, over all packed layers."""
        return sum(values_of(geometry, self.at_tokens) for geometry in self.screened.geometries.values())


def tune(
    model: PreTrainedModel,
    candidates: dict[str, Recipe],
    reading: Reading,
    check: Reading,
    budget: Budget,
    *,
    references: dict[str, Recipe] | None = None,
    dtype: torch.dtype | None = None,
    progress: Progress = lambda what: None,
) -> Tuned:
    """Find the recipe of least KL within a budget of bits, or of fewest bits within a budget of KL.

    Args:
        model: unpatched model. It is left unchanged.
        candidates: recipes by name. Each layer gets one of them. `bits: mixed` without lists of heads is tried head by
            head.
        reading: rows of text that decide, as `read_as` makes it. They are read at once.
        check: other rows, on which the recipe is measured.
        budget: bits or KL.
        references: recipes to measure on the rows of `check` as well.
        dtype: precision in which the model will run, if it differs from the precision measured here.
        progress: called with a text before each step.

    Raises:
        QAttnError: the budget cannot be met, rows are too short to judge a candidate, or a candidate has `layers`. Also
            raised for a model without packed layers, or with packed sliding windows.
    """
    dtype = dtype or model.dtype
    warm.begin_for(model, (references or {}).values())
    tuner = Tuner(model, candidates, reading, budget.at_tokens, dtype, progress)
    options = tuner.options(tuner.screen())
    front = plans([[(option.n_bytes, option.kl) for option in of_layer] for of_layer in options])

    def chosen(plan: Plan) -> list[Option]:
        return [of_layer[i] for of_layer, i in zip(options, plan.picks, strict=True)]

    def measured(plan: Plan) -> tuple[Recipe, Row]:
        recipe = recipe_of(chosen(plan), candidates, tuner.shape.layers)
        return recipe, compare(
            model, {"tuned": recipe}, reading, at_tokens=budget.at_tokens, dtype=dtype, progress=progress
        )[0]

    if budget.bits is not None:
        plan = _within_bits(front, budget.bits, tuner.values())
        recipe, row = measured(plan)
    else:
        assert budget.kl is not None
        plan, recipe, row = _within_measured_kl(front, budget.kl, measured)
    others = {"tuned": recipe, **(references or {})}
    checked = compare(model, others, check, at_tokens=budget.at_tokens, dtype=dtype, progress=progress)
    return Tuned(recipe, plan.kl, row, checked, chosen(plan), tuner.trials)


def _within_bits(front: list[Plan], bits: float, values: int) -> Plan:
    plan = within_bytes(front, int(bits * values / 8))
    if plan is None:
        raise QAttnError(
            f"{bits} bits: the smallest choice of these candidates takes {8 * front[0].n_bytes / values:.3f} bits a "
            "value with everything counted; allow more bits or a longer context, or add smaller candidates"
        )
    return plan


def _within_measured_kl(
    front: list[Plan], kl: float, measured: Callable[[Plan], tuple[Recipe, Row]]
) -> tuple[Plan, Recipe, Row]:
    """Find the smallest plan whose measured KL is within `kl`.

    The KL of all layers together differs from the sum of the layers' KLs. The target is therefore scaled by their ratio
    and the next plan is measured, up to `ROUNDS` times.
    """
    best: tuple[Plan, Recipe, Row] | None = None
    target, tried, least = kl, set(), math.inf
    for _ in range(ROUNDS):
        plan = within_kl(front, target) or front[-1]
        if plan in tried:
            break
        tried.add(plan)
        recipe, row = measured(plan)
        least = min(least, row["kl"])
        if row["kl"] <= kl and (best is None or plan.n_bytes < best[0].n_bytes):
            best = plan, recipe, row
        target = plan.kl * MARGIN * kl / max(row["kl"], TINY)
    if best is None:
        raise QAttnError(
            f"KL of {kl}: the best that was found of these candidates loses {least:.6f}; allow more, or add candidates "
            "of more bits"
        )
    return best
