"""Counters of sparse V: state of a layer with `Sparsity.tau` above 0."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from qattn_kernels.layout import Geometry, State, TensorSpec


class SkipCounts(NamedTuple):
    """Tensors `[B, Hkv]`: state of a layer with names such as `v_read`, or the increments of one call.

    Attributes:
        read: int64, number of weights, one per query and visible token.
        skipped: int64, number of weights whose values were skipped.
        queries: int64, number of queries of the head's group.
        dropped: fp64, sum over queries of the skipped share of their final row sum.
        worst: fp32, largest such share of one query.
    """

    read: Any
    skipped: Any
    queries: Any
    dropped: Any
    worst: Any


TYPES = SkipCounts(torch.int64, torch.int64, torch.int64, torch.float64, torch.float32)


def skip_count_tensors(geo: Geometry) -> dict[str, TensorSpec]:
    """Return the tensors of `SkipCounts` by their names in a layer's state: `v_read`, `v_skipped` and so on."""
    return {f"v_{name}": TensorSpec((geo.batch, geo.heads), dtype) for name, dtype in TYPES._asdict().items()}


def skip_counts_of(state: State) -> SkipCounts:
    """Return the `SkipCounts` of a layer's state, as the tensors themselves."""
    return SkipCounts(*(state[f"v_{name}"] for name in SkipCounts._fields))


def count_skips(weight: torch.Tensor, skip: torch.Tensor, see: torch.Tensor, q_pos: torch.Tensor) -> SkipCounts:
    """Return the skip counts of one call.

    Args:
        weight: final weights, fp32 `[B, Hkv, G, T, n, block]`.
        skip: which of them were skipped.
        see: which tokens each query saw.
        q_pos: row positions of the queries `[B, T]`, negative for padding.
    """
    every = (2, 3, 4, 5)
    dropped = torch.where(skip, weight, 0.0).double().sum((4, 5))
    queries = (weight.shape[2] * (q_pos >= 0).sum(1, keepdim=True)).expand(weight.shape[:2])
    return SkipCounts(
        see.expand_as(skip).sum(every), skip.sum(every), queries, dropped.sum((2, 3)), dropped.amax((2, 3)).float()
    )


def add_skip_counts(state: State, skip_counts: SkipCounts) -> None:
    """Add the skip counts of one call to the layer's counters."""
    kept = skip_counts_of(state)
    for total, new in zip(kept[:4], skip_counts[:4], strict=True):
        total.add_(new)
    torch.maximum(kept.worst, skip_counts.worst, out=kept.worst)
