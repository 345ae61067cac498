"""What a cache of a given length takes, counted from the tensors of caches that are filled to that length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from qattn_hf.bench.layers import fill
from qattn_hf.cache import QAttnCache
from qattn_hf.report import report
from qattn_kernels.layout import Geometry
from qattn_kernels.spec import LayerSpec


class Size(NamedTuple):
    """Of one row of so many tokens, in room for exactly these.

    Attributes:
        kv_bytes: all tensors.
        values: keys and values that they hold.
        effective_bits: a value of closed blocks, mean over layers; None where no block is closed.
    """

    kv_bytes: int
    values: int
    effective_bits: float | None

    @property
    def effective_bits_total(self) -> float:
        """Bits a value with everything that is there."""
        return 8 * self.kv_bytes / self.values


def size_of(cache: QAttnCache, tokens: int, dtype: torch.dtype) -> Size:
    """Size of a cache like this one, which has been written to, for a model that computes in `dtype`."""
    specs = [layer.spec for layer in cache.layers]
    return size_of_layers(zip(specs, (layer.geometry for layer in cache.layers), strict=True), tokens, dtype, cache)


def size_of_layers(
    layers: Iterable[tuple[LayerSpec, Geometry]], tokens: int, dtype: torch.dtype, like: QAttnCache
) -> Size:
    """The same of layers with these specs, each with the heads and dims of a geometry."""
    specs, geometries = zip(*layers, strict=True)
    filled = QAttnCache(list(specs), like.recipe, tokens)
    for layer, geometry in zip(filled.layers, geometries, strict=True):
        nothing = [torch.empty(1, geometry.heads, 0, dim, dtype=dtype) for dim in (geometry.k_dim, geometry.v_dim)]
        layer.lazy_initialization(*nothing)
        fill(layer, tokens)
    found = report(filled).to_dict()
    values = tokens * sum(g.heads * (g.k_dim + g.v_dim) for g in geometries)
    return Size(found["kv_bytes"], values, found["effective_bits"])
