"""KL of what was not tried in a layer, from its error of the attention output and two KLs that were measured.

All candidates' errors are known from one reading (`compare.ShadowCaches`). How much an error of a layer costs differs
from layer to layer by orders of magnitude, and is nearly the same for all that errs alike there. So the KL of the
smallest and of the largest error are measured, and between them log KL is a straight line of log error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

Key = TypeVar("Key")
APART = 1.5  # ratio of two errors from which on their KLs say how KL grows; else it grows as the squared error does
TINY = 1e-12


def anchors(errors: dict[Key, float]) -> list[Key]:
    """What is to be measured of a layer: of the least and of the largest squared error, or the one that there is.

    Args:
        errors: squared errors of the attention output by candidate.
    """
    least, most = min(errors, key=lambda key: errors[key]), max(errors, key=lambda key: errors[key])
    return [least] if least == most else [least, most]


def estimated(errors: dict[Key, float], measured: dict[Key, float]) -> dict[Key, float]:
    """KL of every candidate of a layer: what was measured, and estimates for the others.

    Args:
        errors: squared errors by candidate. measured: KLs of those that `anchors` names.
    """
    points = sorted((math.log(max(errors[key], TINY)), math.log(max(kl, TINY))) for key, kl in measured.items())
    (low, at_low), (high, at_high) = points[0], points[-1]
    slope = (at_high - at_low) / (high - low) if high - low > math.log(APART) else 1.0
    slope = slope if slope > 0 else 1.0
    middle, at_middle = (low + high) / 2, (at_low + at_high) / 2
    line = {key: math.exp(at_middle + slope * (math.log(max(e, TINY)) - middle)) for key, e in errors.items()}
    return {**line, **measured}


def fewer(at: Sequence[int], first: int, most: int = 10) -> list[int]:
    """Boundaries of chunks of a reading with `most` chunks or more, made longer: all before `first`, the first scored
    token, is one, and of the others two are."""
    if len(at) <= most:
        return list(at)
    start = next(i for i, column in enumerate(at) if column >= first)
    return sorted({0, *at[start : len(at) - 1 : 2], at[-1]})
