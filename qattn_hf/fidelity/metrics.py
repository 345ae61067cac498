"""Figures of fidelity: of a model's logits, token by token, and of attention outputs, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

Tokens = dict[str, torch.Tensor]


def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats of log-probabilities `[..., vocabulary]`."""
    p = log_p.exp()
    # a model may forbid tokens by logits of minus infinity; they carry no mass in p
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


def token_figures(full: torch.Tensor, packed: torch.Tensor, right: torch.Tensor) -> Tokens:
    """What a packed cache did to each prediction.

    Args:
        full, packed: logits `[B, T, vocabulary]` of the model in full precision and through the packed cache.
        right: `[B, T]`, the tokens that the text has there.

    Returns:
        fp32 `[B, T]` each: `kl` of full precision to the packed cache in nats, `same_top1` 1 where both choose the same
        token, `change` of the right token's probability, `nll_full` and `nll` of the right token.
    """
    log_p, log_q = full.float().log_softmax(-1), packed.float().log_softmax(-1)
    right_p, right_q = (x.gather(-1, right[..., None])[..., 0] for x in (log_p, log_q))
    return {
        "kl": divergence(log_p, log_q),
        "same_top1": (log_p.argmax(-1) == log_q.argmax(-1)).float(),
        "change": right_q.exp() - right_p.exp(),
        "nll_full": -right_p,
        "nll": -right_q,
    }


def text_figures(tokens: Tokens) -> dict[str, float | None]:
    """Figures of a whole text from those of its tokens, `[rows, T]` each.

    `kl` and `same_top1` are means; `rms_change` of the right token's probability; perplexities, and the change in
    per cent. Standard errors are those of means over rows, of the change paired row by row; None for a single row.
    """
    tokens = {name: figure.double() for name, figure in tokens.items()}
    more = (tokens["nll"] - tokens["nll_full"]).mean(1)
    return {
        "kl": tokens["kl"].mean().item(),
        "kl_se": _standard_error(tokens["kl"].mean(1)),
        "same_top1": tokens["same_top1"].mean().item(),
        "rms_change": tokens["change"].square().mean().sqrt().item(),
        "ppl_full": math.exp(tokens["nll_full"].mean()),
        "ppl": math.exp(tokens["nll"].mean()),
        "ppl_change_pct": 100 * math.expm1(more.mean()),
        "ppl_change_se_pct": _standard_error(100 * more),
    }


def _standard_error(rows: torch.Tensor) -> float | None:
    return (rows.std() / len(rows) ** 0.5).item() if len(rows) > 1 else None


class AttentionSums:
    """Sums over attention outputs, from which SageAttention2's three figures follow (its section 4.1)."""

    def __init__(self) -> None:
        self.sums: torch.Tensor | None = None

    def add(self, full: torch.Tensor, packed: torch.Tensor) -> None:
        """Outputs of the same shape, of the same queries, keys and values; nothing waits for the device."""
        full, packed = full.double(), packed.double()
        off = packed - full
        found = [(full * packed), full.square(), packed.square(), off.abs(), full.abs(), off.square()]
        sums = torch.stack([*(x.sum() for x in found), torch.full_like(full[(0,) * full.dim()], full.numel())])
        self.sums = sums if self.sums is None else self.sums + sums

    def figures(self) -> dict[str, float]:
        """`cosine` of all outputs as one vector, `relative_l1` error, `rmse`."""
        assert self.sums is not None
        dot, full2, packed2, off, size, off2, count = self.sums.tolist()
        tiny = 1e-300  # outputs of nothing but zeros
        return {
            "cosine": dot / max(math.sqrt(full2 * packed2), tiny),
            "relative_l1": off / max(size, tiny),
            "rmse": math.sqrt(off2 / count),
        }


def over_layers(layers: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """`average` and `worst` layer of each figure; the worst cosine is the smallest."""
    columns = {name: [layer[name] for layer in layers] for name in layers[0]}
    return {
        "average": {name: sum(column) / len(column) for name, column in columns.items()},
        "worst": {name: (min if name == "cosine" else max)(column) for name, column in columns.items()},
    }


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats: none has at most its cost and at most its loss, and less of either.

    In order of cost; of equal points the first counts.
    """
    order = sorted(range(len(points)), key=lambda i: (*points[i], i))
    front: list[int] = []
    for i in order:
        if not front or points[i][1] < points[front[-1]][1]:
            front.append(i)
    return front
