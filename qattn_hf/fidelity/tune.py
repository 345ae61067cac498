"""Find a recipe for one model within a budget of bits or of KL, for `qattn tune`.

Unpacked layers stay unchanged. Layers, bytes and bits below count only packed layers.

1. Screening. All candidates read what a model in full precision reads (`screening`). This gives each candidate's KL on
   all layers, and its error of the attention output in each layer. A layer drops a candidate if another one needs no
   more bytes and has no larger error. It also drops a candidate that chooses heads if a smaller candidate is nearly as
   good.
2. Sensitivity. Candidates of least and of largest error are tried in each layer alone, the rest in full precision
   (`sensitivity`). The losses of other candidates follow from their errors (`estimate`). Candidates that choose heads
   are tried head by head.
3. Scale. Losses of single layers do not quite add up. A candidate's losses are scaled so that their sum is its KL on
   all layers.
4. Budget. `budget.plans` finds the best sum for every size. For a budget in bits the plan is tried on all layers. The
   best candidate for all layers within the budget replaces a plan that loses more.
5. Check. The recipe is measured end to end, on the rows that it was tuned on and on other rows. For a budget in KL, the
   measured KL corrects the plan until it holds.

Steps 1 to 4 read in fp32 (`reading.precision`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from qattn_hf.errors import QAttnError
from qattn_hf.fidelity.budget import Plan, plans, within_bytes, within_kl
from qattn_hf.fidelity.compare import Progress, Row, compare
from qattn_hf.fidelity.options import Option
from qattn_hf.fidelity.tuned import recipe_of
from qattn_hf.fidelity.tuner import Tuner
from qattn_hf.reading.precision import in_float32
from qattn_hf.reading.texts import Reading
from qattn_hf.recipes.recipe import Recipe

ROUNDS = 5  # plans that are measured for a budget in KL
MARGIN = 0.97  # share of a budget in KL that a correction aims at, so the result does not end just above the budget
TINY = 1e-12


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
        predicted: expected KL, in nats per token. For a budget in bits it was measured with the errors of all layers on
            full-precision inputs. For a budget in KL it is the sum of the layers' KLs.
        uniform: for a budget in bits, the best candidate that all layers can share, and its expected KL. None if no
            candidate fits.
        measured: for a budget in KL, row of `compare` for the recipe, on the rows that it was tuned on. For a budget in
            bits, None.
        checked: rows of `compare` on other rows: for the recipe, then for the references. Like `measured` they have no
            figures of single layers.
        chosen: the option chosen for each packed layer.
        trials: one row for each candidate of each layer. `kl` is its loss with the rest of the model in full precision.
            `measured` is false if `kl` is estimated from an error. `side` and `head` name the one 2-bit head (empty: no
            head has 2 bits).
    """

    recipe: Recipe
    predicted: float
    uniform: tuple[str, float] | None
    measured: Row | None
    checked: list[Row]
    chosen: list[Option]
    trials: list[Row]


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
    tuner = Tuner(model, candidates, reading, budget.at_tokens, dtype, progress)
    if budget.bits is not None and (fewest := tuner.fewest_bytes()) > _bytes(budget.bits, tuner.values()):
        raise _too_few(budget.bits, fewest, tuner.values())  # before any trial
    with in_float32(model):
        options = tuner.options(tuner.screen())
        front = plans([[(option.n_bytes, option.kl) for option in of_layer] for of_layer in options])
        if budget.bits is not None:
            planned = _picked(options, _within_bits(front, budget.bits, tuner.values()))
            chosen, predicted, uniform = _best(tuner, planned, budget.bits)
    recipe: Recipe
    row: Row | None = None
    if budget.kl is None:
        recipe = recipe_of(chosen, candidates, tuner.shape.layers)
    else:
        plan, recipe, row = _within_measured_kl(
            front, budget.kl, lambda plan: _measured(tuner, _picked(options, plan), candidates)
        )
        chosen, predicted, uniform = _picked(options, plan), plan.kl, None
    checked = _compared(tuner, {"tuned": recipe, **(references or {})}, check)
    return Tuned(recipe, predicted, uniform, row, checked, chosen, tuner.trials)


def _picked(options: list[list[Option]], plan: Plan) -> list[Option]:
    return [of_layer[i] for of_layer, i in zip(options, plan.picks, strict=True)]


def _best(tuner: Tuner, planned: list[Option], bits: float) -> tuple[list[Option], float, tuple[str, float] | None]:
    """Try planned options on all layers. Returns them, or the best candidate for all layers if it loses less.

    Returns:
        The options, their KL, and the best candidate for all layers with its KL.
    """
    predicted, uniform = tuner.whole(planned), tuner.uniform(bits)
    if uniform is not None and uniform[1] < predicted:
        return tuner.in_all_layers(uniform[0]), uniform[1], uniform
    return planned, predicted, uniform


def _measured(tuner: Tuner, options: list[Option], candidates: dict[str, Recipe]) -> tuple[Recipe, Row]:
    """Make the recipe of some options, and measure it on the rows that decide."""
    recipe = recipe_of(options, candidates, tuner.shape.layers)
    return recipe, _compared(tuner, {"tuned": recipe}, tuner.reading)[0]


def _compared(tuner: Tuner, recipes: dict[str, Recipe], reading: Reading) -> list[Row]:
    return compare(
        tuner.model,
        recipes,
        reading,
        at_tokens=tuner.at_tokens,
        dtype=tuner.dtype,
        by_layer=False,
        progress=tuner.progress,
    )


def _within_bits(front: list[Plan], bits: float, values: int) -> Plan:
    plan = within_bytes(front, _bytes(bits, values))
    if plan is None:
        raise _too_few(bits, front[0].n_bytes, values)
    return plan


def _bytes(bits: float, values: int) -> int:
    return int(bits * values / 8)


def _too_few(bits: float, fewest: int, values: int) -> QAttnError:
    return QAttnError(
        f"{bits} bits: the smallest choice of these candidates takes {8 * fewest / values:.3f} bits a value with "
        "everything counted; allow more bits or a longer context, or add smaller candidates"
    )


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
