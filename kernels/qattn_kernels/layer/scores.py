"""Settings of a model's attention scores."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Scores(NamedTuple):
    """Settings of a model's attention scores.

    Attributes:
        scale: factor of `q . k`, usually `1 / sqrt(D)`.
        softcap: cap in `cap * tanh(score / cap)`; 0 for none.
        window: number of tokens that a query sees, itself included; 0 for all. `-n`: the tokens of its chunk, which
            starts at a multiple of `n` positions.
        sinks: fp32 `[Hq]`, a learned logit per head that adds weight but no value, or None.
    """

    scale: float
    softcap: float = 0.0
    window: int = 0
    sinks: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether scores are only scaled."""
        return not self.softcap and not self.window and self.sinks is None
