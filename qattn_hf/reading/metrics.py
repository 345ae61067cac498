"""Metrics of the distance from full precision: of logits, token by token, and of attention outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

Tokens = dict[str, torch.Tensor]


def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Compute KL(p || q) in nats, `[...]`, from log-probabilities `[..., vocabulary]`."""
    p = log_p.exp()
    # a model may forbid tokens by logits of minus infinity; such tokens have no mass in p
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


def token_figures(full: torch.Tensor, packed: torch.Tensor, targets: torch.Tensor) -> Tokens:
    """Compute metrics of each prediction through a packed cache.

    Args:
        full, packed: logits `[B, T, vocabulary]` of the model in full precision and through the packed cache.
        targets: int64 `[B, T]`, the tokens that follow in the text.

    Returns:
        Figures, fp32 `[B, T]` each: `kl` of full precision to the packed cache in nats, `same_top1` (1 where both
        choose the same token), `change` of the target's probability, `nll_full` and `nll` of the target.
    """
    log_p, log_q = full.float().log_softmax(-1), packed.float().log_softmax(-1)
    target_p, target_q = (x.gather(-1, targets[..., None])[..., 0] for x in (log_p, log_q))
    return {
        "kl": divergence(log_p, log_q),
        "same_top1": (log_p.argmax(-1) == log_q.argmax(-1)).float(),
        "change": target_q.exp() - target_p.exp(),
        "nll_full": -target_p,
        "nll": -target_q,
    }


def text_figures(tokens: Tokens) -> dict[str, float | None]:
    """Compute metrics of a whole text from the metrics of its tokens, `[rows, T]` each.

    Returns:
        `kl` and `same_top1`: means. `rms_change`: root mean square change of the target's probability. `ppl_full`,
        `ppl`: perplexities. `ppl_change_pct`: their change in per cent. `kl_se`, `ppl_change_se_pct`: standard errors
        over rows, None for a single row.
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
    """Sums over attention outputs, for the three metrics of SageAttention2 (section 4.1)."""

    def __init__(self) -> None:
        self.sums: torch.Tensor | None = None

    def add(self, full: torch.Tensor, packed: torch.Tensor) -> None:
        """Add two outputs of one shape, for the same queries, keys and values. Does not wait for the device."""
        full, packed = full.double(), packed.double()
        error = packed - full
        terms = [(full * packed), full.square(), packed.square(), error.abs(), full.abs(), error.square()]
        sums = torch.stack([*(x.sum() for x in terms), torch.full_like(full[(0,) * full.dim()], full.numel())])
        self.sums = sums if self.sums is None else self.sums + sums

    def figures(self) -> dict[str, float]:
        """Return the `cosine` similarity of all outputs as one vector, the `relative_l1` error, and the `rmse`."""
        assert self.sums is not None
        dot, full2, packed2, error, size, error2, count = self.sums.tolist()
        tiny = 1e-300  # in case all outputs are zeros
        return {
            "cosine": dot / max(math.sqrt(full2 * packed2), tiny),
            "relative_l1": error / max(size, tiny),
            "rmse": math.sqrt(error2 / count),
        }


def over_layers(layers: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Return the `average` and `worst` of each metric over layers. The worst cosine is the smallest."""
    columns = {name: [layer[name] for layer in layers] for name in layers[0]}
    return {
        "average": {name: sum(column) / len(column) for name, column in columns.items()},
        "worst": {name: (min if name == "cosine" else max)(column) for name, column in columns.items()},
    }


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of points on the Pareto front of (cost, loss), in order of cost; of equal points the first."""
    order = sorted(range(len(points)), key=lambda i: (*points[i], i))
    front: list[int] = []
    for i in order:
        if not front or points[i][1] < points[front[-1]][1]:
            front.append(i)
    return front
