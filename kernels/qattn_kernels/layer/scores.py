"""What a model asks of the scores of its attention."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Scores(NamedTuple):
    """What a model asks of the scores.

    Attributes:
        scale: of `q . k`, usually `1 / sqrt(D)`.
        softcap: `cap * tanh(score / cap)`; 0 is none.
        window: a query sees only this many tokens, itself included; 0 is all. `-n`: those of its chunk, which begins at
            a multiple of `n` positions.
        sinks: fp32 `[Hq]`, a learned logit a head that takes weight and gives no value; or None.
    """

    scale: float
    softcap: float = 0.0
    window: int = 0
    sinks: torch.Tensor | None = None
