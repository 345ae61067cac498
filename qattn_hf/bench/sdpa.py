"""The baseline: one layer of a preallocated unpacked cache, and PyTorch's SDPA by backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from qattn_hf.bench.layers import Heads


class Backend(NamedTuple):
    """A backend of SDPA. If `packed`, query heads that share a KV head become rows of one head, so it is read once."""

    kernel: SDPBackend
    packed: bool = False


BACKENDS = {
    "flash": Backend(SDPBackend.FLASH_ATTENTION),
    "cudnn": Backend(SDPBackend.CUDNN_ATTENTION),
    "efficient": Backend(SDPBackend.EFFICIENT_ATTENTION),
    "math": Backend(SDPBackend.MATH),
    "flash packed": Backend(SDPBackend.FLASH_ATTENTION, packed=True),
    "cudnn packed": Backend(SDPBackend.CUDNN_ATTENTION, packed=True),
    "efficient packed": Backend(SDPBackend.EFFICIENT_ATTENTION, packed=True),
}
MATH_TOKENS = 16384  # most tokens of all rows; beyond it the repeated heads of `math` only cost time and memory


class Cache:
    """Keys and values `[B, Hkv, S, D]` of exactly `context` tokens. Each step overwrites the last token."""

    def __init__(self, heads: Heads, batch: int, context: int, device: torch.device):
        shape = (batch, heads.kv, context, heads.dim)
        self.k, self.v = (torch.randn(shape, dtype=heads.dtype, device=device) for _ in range(2))
        self.last = torch.tensor([context - 1], device=device)

    def step(self, backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return a function that writes the new token and attends: q `[B, Hq, 1, D]`, k and v `[B, Hkv, 1, D]`."""
        packed = q.view(q.shape[0], k.shape[1], -1, q.shape[3])

        def run() -> torch.Tensor:
            self.k.index_copy_(2, self.last, k)
            self.v.index_copy_(2, self.last, v)
            with sdpa_kernel(backend.kernel):
                if backend.packed:
                    return F.scaled_dot_product_attention(packed, self.k, self.v).reshape(q.shape)
                return F.scaled_dot_product_attention(q, self.k, self.v, enable_gqa=True)

        return run


def causal(backend: Backend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of a prompt: q `[B, Hq, T, D]`, k and v `[B, Hkv, T, D]`."""
    with sdpa_kernel(backend.kernel):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
