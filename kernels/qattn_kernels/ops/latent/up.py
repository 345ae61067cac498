"""The up-projections of latent attention (MLA), in plain PyTorch: absorbed into queries and outputs, or expanding what
is stored."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class UpProjections(NamedTuple):
    """`k`: `W_UK` `[Hq, Dn, R]`, `v`: `W_UV` `[Hq, Dv, R]`, of latents of `R` channels."""

    k: torch.Tensor
    v: torch.Tensor

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Queries `[B, Hq, T, Dn + rope]` as those over stored keys, `[B, Hq, T, R + rope]`."""
        nope, rope = query.split([self.k.shape[1], query.shape[-1] - self.k.shape[1]], -1)
        return torch.cat([_by_head(nope, self.k), rope], -1)

    def expand(self, attended: torch.Tensor) -> torch.Tensor:
        """Attended latents `[B, Hq, T, R]` as values `[B, Hq, T, Dv]`."""
        return _by_head(attended, self.v.mT)

    def expand_kv(self, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[B, Hq, N, Dn + rope]` and values `[B, Hq, N, Dv]` of latents `[B, 1, N, R]` and RoPE parts
        `[B, 1, N, rope]`."""
        nope, value = (_of_all_heads(latent, w) for w in (self.k, self.v))
        return torch.cat([nope, rope.expand(-1, len(self.k), -1, -1)], -1), value


# Products that PyTorch would broadcast over rows or heads are written so that none of their factors is copied for each.


def _by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` `[B, H, T, D]` times `weight` `[H, D, E]`."""
    batch, heads, tokens, dim = x.shape
    product = x.transpose(0, 1).reshape(heads, batch * tokens, dim) @ weight
    return product.view(heads, batch, tokens, -1).transpose(0, 1)


def _of_all_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` `[B, 1, N, R]` times the transposed `weight` `[H, D, R]`: `[B, H, N, D]`."""
    product = F.linear(x[:, 0], weight.reshape(-1, weight.shape[-1]))
    return product.unflatten(-1, weight.shape[:2]).transpose(1, 2)
