"""What sparse V skipped: counters of a layer, kept while `Sparsity.tau` is above 0."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from qattn_kernels.layout import Geometry, State, TensorSpec


class SkipCounts(NamedTuple):
    """Tensors `[B, Hkv]`, state of a layer under the names `v_read` and so on, or what one call adds to them.

    Attributes:
        read: int64, weights that queries had, of every token that a query saw.
        skipped: int64, those whose value was not read.
        queries: int64, queries of the head's group.
        dropped: fp64, sum over queries of the share of their final row sum that was skipped.
        worst: fp32, the largest such share of one query.
    """

    read: Any
    skipped: Any
    queries: Any
    dropped: Any
    worst: Any


TYPES = SkipCounts(torch.int64, torch.int64, torch.int64, torch.float64, torch.float32)


def skip_count_tensors(geo: Geometry) -> dict[str, TensorSpec]:
    """The tensors of `SkipCounts` by their names in a layer's state: `v_read`, `v_skipped` and so on."""
    return {f"v_{name}": TensorSpec((geo.batch, geo.heads), dtype) for name, dtype in TYPES._asdict().items()}


def skip_counts_of(state: State) -> SkipCounts:
    """The `SkipCounts` of a layer's state: the tensors themselves, not copies."""
    return SkipCounts(*(state[f"v_{name}"] for name in SkipCounts._fields))


def count_skips(weight: torch.Tensor, skip: torch.Tensor, see: torch.Tensor, q_pos: torch.Tensor) -> SkipCounts:
    """The skip counts of one call from its final weights fp32 `[B, Hkv, G, T, n, block]`, which of them were skipped,
    which tokens were seen, and the queries' row positions `[B, T]`, negative for padding."""
    every = (2, 3, 4, 5)
    dropped = torch.where(skip, weight, 0.0).double().sum((4, 5))
    queries = (weight.shape[2] * (q_pos >= 0).sum(1, keepdim=True)).expand(weight.shape[:2])
    return SkipCounts(
        see.expand_as(skip).sum(every), skip.sum(every), queries, dropped.sum((2, 3)), dropped.amax((2, 3)).float()
    )


def add_skip_counts(state: State, skip_counts: SkipCounts) -> None:
    """Add the skip counts of a call to a layer's."""
    kept = skip_counts_of(state)
    for total, new in zip(kept[:4], skip_counts[:4], strict=True):
        total.add_(new)
    torch.maximum(kept.worst, skip_counts.worst, out=kept.worst)
