"""Packed layers for benchmarks: their shape, and the bytes that a step reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from qattn_hf.layer.filled import BOOKKEEPING
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.methods import Method
from qattn_kernels.layer.support import no_triton, unsupported


@dataclass(frozen=True)
class Heads:
    """Shape of one attention layer: query heads, KV heads, head dim, and dtype of queries, keys and values."""

    query: int = 32
    kv: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def bytes_per_token(self) -> int:
        """Return the bytes of one token's unpacked keys and values, in `dtype`."""
        return 2 * self.kv * self.dim * self.dtype.itemsize

    def row(self) -> dict[str, Any]:
        """Return the shape as fields of a JSON row: `heads`, `kv_heads`, `head_dim`, `dtype`."""
        sizes = {"heads": self.query, "kv_heads": self.kv, "head_dim": self.dim}
        return {**sizes, "dtype": str(self.dtype).removeprefix("torch.")}


def make_layer(settings: Method, heads: Heads, batch: int, capacity: int, device: torch.device) -> QAttnLayer:
    """Make an empty packed layer with room for `capacity` tokens in each row, from a method's settings."""
    spec = settings.last_layer_spec(heads.kv)
    reason = no_triton(device.type) or unsupported(spec, heads.kv, heads.dim, heads.dim)
    layer = QAttnLayer(replace(spec, impl=settings.chosen_impl(device.type, reason)), capacity)
    nothing = torch.empty(batch, heads.kv, 0, heads.dim, dtype=heads.dtype, device=device)
    layer.lazy_initialization(nothing, nothing)
    return layer


def bookkeeping(layers: list[QAttnLayer]) -> Callable[[], None]:
    """Return a function that resets the lengths of `layers` to their present values, so a step can run repeatedly.

    Quantized values are left in place. The next step overwrites the values of the last step.
    """
    tensors = [t for layer in layers for t in layer.state.values() if t.dtype in BOOKKEEPING]
    saved = [t.clone() for t in tensors]

    def restore() -> None:
        torch._foreach_copy_(tensors, saved)

    return restore


def bytes_read(layer: QAttnLayer, tokens: int) -> int:
    """Return the bytes of a layer's block tensors for `tokens` tokens in each row, which a decode step reads."""
    block_tensors = (layer.state[name] for name, spec in layer.tensor_specs().items() if spec.block_dim is not None)
    return sum(t.nbytes for t in block_tensors) * tokens // layer.capacity
