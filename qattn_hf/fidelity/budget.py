"""Choose one option for each layer: the least loss within a size, or the smallest size within a loss.

Losses and bytes add up over layers. Plans form the Pareto front of both sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from qattn_hf.reading.metrics import pareto

MAX_PLANS = 2048  # kept after each layer, spread evenly over the bytes


class Plan(NamedTuple):
    """A choice for every layer: `picks`, the index of each layer's option, and the total bytes and KL."""

    n_bytes: int
    kl: float
    picks: tuple[int, ...]


def plans(layers: Sequence[Sequence[tuple[int, float]]]) -> list[Plan]:
    """Return the plans on the Pareto front of bytes and KL, in order of bytes.

    Args:
        layers: for each layer, the bytes and KL of each option.
    """
    largest = sum(max(n_bytes for n_bytes, _ in options) for options in layers)
    front = [Plan(0, 0.0, ())]
    for options in layers:
        useful = pareto(list(options))
        longer = [
            Plan(plan.n_bytes + options[i][0], plan.kl + options[i][1], (*plan.picks, i))
            for plan in front
            for i in useful
        ]
        front = _thinned([longer[i] for i in pareto([plan[:2] for plan in longer])], -(-largest // MAX_PLANS))
    return front


def _thinned(front: list[Plan], step: int) -> list[Plan]:
    """Thin a front: keep the plan of least loss within each `step` bytes, and the smallest plan."""
    best = {plan.n_bytes // step: plan for plan in front}
    thinned = list(best.values())
    return thinned if thinned[0] is front[0] else [front[0], *thinned]


def within_bytes(front: list[Plan], n_bytes: int) -> Plan | None:
    """Return the plan of least loss with at most `n_bytes`, or None if all plans are larger."""
    return next((plan for plan in reversed(front) if plan.n_bytes <= n_bytes), None)


def within_kl(front: list[Plan], kl: float) -> Plan | None:
    """Return the smallest plan with a loss of at most `kl`, or None if all plans lose more."""
    return next((plan for plan in front if plan.kl <= kl), None)
