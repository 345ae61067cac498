"""The cheapest way to spend a loss, and the least loss for a size: one option a layer, losses and bytes added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from qattn_hf.fidelity.metrics import pareto

FINE = 2048  # plans that are kept a layer, spread evenly over the bytes; more would only split hairs


class Plan(NamedTuple):
    """`picks`: the index of each layer's option; `n_bytes`, `kl`: their sums."""

    n_bytes: int
    kl: float
    picks: tuple[int, ...]


def plans(layers: Sequence[Sequence[tuple[int, float]]]) -> list[Plan]:
    """Every plan that no other beats, in order of bytes.

    Args:
        layers: bytes and KL of each option of each layer.
    """
    most = sum(max(n_bytes for n_bytes, _ in options) for options in layers)
    found = [Plan(0, 0.0, ())]
    for options in layers:
        useful = pareto(list(options))
        longer = [
            Plan(plan.n_bytes + options[i][0], plan.kl + options[i][1], (*plan.picks, i))
            for plan in found
            for i in useful
        ]
        found = _thinned([longer[i] for i in pareto([plan[:2] for plan in longer])], -(-most // FINE))
    return found


def _thinned(front: list[Plan], step: int) -> list[Plan]:
    """Of the plans of a front that lie in one `step` of bytes the last, which has the least loss; and the smallest."""
    best = {plan.n_bytes // step: plan for plan in front}
    kept = list(best.values())
    return kept if kept[0] is front[0] else [front[0], *kept]


def within_bytes(found: list[Plan], n_bytes: int) -> Plan | None:
    """The plan of least loss that is no larger."""
    return next((plan for plan in reversed(found) if plan.n_bytes <= n_bytes), None)


def within_kl(found: list[Plan], kl: float) -> Plan | None:
    """The smallest plan that loses no more."""
    return next((plan for plan in found if plan.kl <= kl), None)
