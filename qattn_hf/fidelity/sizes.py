"""What a cache of a given length takes, counted from the tensors of caches of that length."""

from __future__ import annotations

from typing import NamedTuple

import torch

from qattn_hf.bench.layers import fill
from qattn_hf.cache import QAttnCache
from qattn_hf.layer import QAttnLayer
from qattn_hf.reporting import report
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import Geometry


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


def values_of(geometry: Geometry, tokens: int) -> int:
    """Keys and values of a row in one layer."""
    return tokens * geometry.heads * (geometry.k_dim + geometry.v_dim)


def size_of(cache: QAttnCache, tokens: int, dtype: torch.dtype) -> Size:
    """Size of a cache like this one, which has been written to, for a model that computes in `dtype`."""
    filled = QAttnCache([layer.spec for layer in cache.layers], cache.recipe, tokens)
    for layer, like in zip(filled.layers, cache.layers, strict=True):
        _initialize(layer, like.geometry, dtype, "cpu")
        fill(layer, tokens)
    found = report(filled).to_dict()
    values = sum(values_of(layer.geometry, tokens) for layer in cache.layers)
    return Size(found["kv_bytes"], values, found["effective_bits"])


def layer_bytes(spec: LayerSpec, geometry: Geometry, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the tensors of one layer of such a cache, none of which is allocated."""
    layer = QAttnLayer(spec, tokens)
    _initialize(layer, geometry, dtype, "meta")
    return sum(tensor.nbytes for tensor, _ in layer.state_tensors().values())


def _initialize(layer: QAttnLayer, geometry: Geometry, dtype: torch.dtype, device: str) -> None:
    dims = (geometry.k_dim, geometry.v_dim)
    layer.lazy_initialization(*(torch.empty(1, geometry.heads, 0, dim, dtype=dtype, device=device) for dim in dims))
