"""Bytes and bits of a cache of a given length, counted from the tensors of such a cache."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from qattn_hf.cache.cache import QAttnCache
from qattn_hf.cache.reporting import report
from qattn_hf.layer.budget_layer import BudgetLayer
from qattn_hf.layer.filled import fill
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.layer.window_layer import packed_layer
from qattn_hf.model.heads import head_sizes
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import Geometry

SPACING = 2**13  # tokens, a multiple of every block size


class Size(NamedTuple):
    """Size of the packed layers of a one-row cache, with a capacity of exactly its tokens.

    Attributes:
        kv_bytes: bytes of all tensors.
        values: number of cached keys and values; for a sliding window, those that a query sees.
        effective_bits: bits per value in closed blocks, mean over layers; None if no block is closed.
    """

    kv_bytes: int
    values: int
    effective_bits: float | None

    @property
    def effective_bits_total(self) -> float:
        """Bits per value, over all tensors."""
        return 8 * self.kv_bytes / self.values


def values_of(geometry: Geometry, tokens: int) -> int:
    """Return the number of values in the keys and values of `tokens` tokens of one row and layer."""
    return tokens * geometry.heads * (geometry.k_dim + geometry.v_dim)


def size_of(cache: QAttnCache, tokens: int, dtype: torch.dtype) -> Size:
    """Return the size of the packed layers of a cache like this one, with one row of `tokens` tokens.

    Args:
        cache: a cache after its first call.
        dtype: dtype of the model, in which unquantized parts of the cache are counted.
    """
    filled = QAttnCache([layer.spec for layer in cache.packed], cache.recipe, tokens)
    for layer, like in zip(filled.layers, cache.packed, strict=True):
        _initialize(layer, like.geometry, dtype, "cpu", tokens)
        fill(layer, min(tokens, layer.capacity))  # a window's capacity already equals its need
    data = report(filled).to_dict()
    shown = [getattr(layer.spec, "sliding_window", tokens) for layer in cache.packed]
    values = sum(values_of(layer.geometry, min(tokens, n)) for layer, n in zip(cache.packed, shown, strict=True))
    return Size(data["kv_bytes"], values, data["effective_bits"])


def geometry_of(config: PretrainedConfig, layer: int, dtype: torch.dtype) -> Geometry:
    """Return the geometry of one row of a layer of a model with keys and values of this dtype."""
    heads = head_sizes(config, layer)
    return Geometry(1, heads.kv, heads.dim, heads.v_dim, 1, dtype)


def bits_total(config: PretrainedConfig, specs: Mapping[int, LayerSpec], tokens: int, dtype: torch.dtype) -> float:
    """Return the bits per value of packed layers of a model, over all tensors, for one row of `tokens` tokens.

    Counted without memory. `size_of` counts the same from the tensors of a cache.

    Args:
        specs: by index of the layer.
    """
    geometries = {i: geometry_of(config, i, dtype) for i in specs}
    n_bytes = sum(layer_bytes(spec, geometries[i], tokens, dtype) for i, spec in specs.items())
    return 8 * n_bytes / sum(values_of(geometry, tokens) for geometry in geometries.values())


@lru_cache(1024)
def layer_bytes(spec: LayerSpec, geometry: Geometry, tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of one layer's tensors for a row of `tokens` tokens. Counted on the meta
    device, without memory."""
    layer = packed_layer(spec, tokens)
    _initialize(layer, geometry, dtype, "meta", tokens)
    return sum(tensor.nbytes for tensor, _ in layer.state_tensors().values())


def block_bits(spec: LayerSpec, geometry: Geometry, dtype: torch.dtype) -> float:
    """Return the bits per value in a layer's closed blocks: the growth per token, without the open tokens."""
    more = layer_bytes(spec, geometry, 2 * SPACING, dtype) - layer_bytes(spec, geometry, SPACING, dtype)
    return 8 * more / values_of(geometry, SPACING)


def _initialize(layer: QAttnLayer, geometry: Geometry, dtype: torch.dtype, device: str, tokens: int) -> None:
    if isinstance(layer, BudgetLayer):
        layer.reserve(tokens)  # an empty layer would have other bits
    dims = (geometry.k_dim, geometry.v_dim)
    layer.lazy_initialization(*(torch.empty(1, geometry.heads, 0, dim, dtype=dtype, device=device) for dim in dims))
