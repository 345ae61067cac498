"""Estimate the KL of candidates that were not tried in a layer from their errors of the attention output.

One reading gives the errors of all candidates (`screening`). Layers differ in how much an error costs. So the KLs of
the smallest and of the largest error in a layer are measured. Between these two points log KL is taken as linear in
log error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

Key = TypeVar("Key")
APART = 1.5  # squared errors with a larger ratio give the slope; for closer ones KL is proportional to them
TINY = 1e-12


def anchors(errors: dict[Key, float]) -> list[Key]:
    """Choose the candidates of a layer to measure: those with the least and the largest squared error.

    Args:
        errors: squared errors of the attention output by candidate.

    Returns:
        Two candidates, or one if both are the same.
    """
    least, most = min(errors, key=lambda key: errors[key]), max(errors, key=lambda key: errors[key])
    return [least] if least == most else [least, most]


def estimated(errors: dict[Key, float], measured: dict[Key, float]) -> dict[Key, float]:
    """Return the KL of every candidate of a layer: measured ones as measured, the others estimated.

    Args:
        errors: squared errors by candidate.
        measured: KLs of the candidates that `anchors` names.
    """
    points = sorted((math.log(max(errors[key], TINY)), math.log(max(kl, TINY))) for key, kl in measured.items())
    (low, at_low), (high, at_high) = points[0], points[-1]
    slope = (at_high - at_low) / (high - low) if high - low > math.log(APART) else 1.0
    slope = slope if slope > 0 else 1.0
    middle, at_middle = (low + high) / 2, (at_low + at_high) / 2
    line = {key: math.exp(at_middle + slope * (math.log(max(e, TINY)) - middle)) for key, e in errors.items()}
    return {**line, **measured}


def fewer(at: Sequence[int], most: int = 12) -> list[int]:
    """Return boundaries of at most `most` chunks, for a reading with more: several chunks become one."""
    return sorted({*at[:: -(-(len(at) - 1) // most)], at[-1]})
