"""The up-projections of latent attention (MLA) in PyTorch.

They are either absorbed into queries and outputs, or expand the stored latents into keys and values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class UpProjections(NamedTuple):
    """Weights of the up-projections from latents with `R` channels.

    Attributes:
        k: `W_UK` `[Hq, Dn, R]`.
        v: `W_UV` `[Hq, Dv, R]`.
    """

    k: torch.Tensor
    v: torch.Tensor

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Project queries `[B, Hq, T, Dn + rope]` to `[B, Hq, T, R + rope]`, which read stored keys."""
        nope, rope = query.split([self.k.shape[1], query.shape[-1] - self.k.shape[1]], -1)
        return torch.cat([_by_head(nope, self.k), rope], -1)

    def expand(self, attended: torch.Tensor) -> torch.Tensor:
        """Expand attended latents `[B, Hq, T, R]` to values `[B, Hq, T, Dv]`."""
        return _by_head(attended, self.v.mT)

    def expand_kv(self, latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expand latents `[B, 1, N, R]` and RoPE parts `[B, 1, N, rope]`.

        Returns:
            Keys `[B, Hq, N, Dn + rope]` and values `[B, Hq, N, Dv]`.
        """
        nope, value = (_of_all_heads(latent, w) for w in (self.k, self.v))
        return torch.cat([nope, rope.expand(-1, len(self.k), -1, -1)], -1), value


# PyTorch copies a factor that it broadcasts over rows or heads. These products avoid the copy.


def _by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply `x` `[B, H, T, D]` by `weight` `[H, D, E]`."""
    batch, heads, tokens, dim = x.shape
    product = x.transpose(0, 1).reshape(heads, batch * tokens, dim) @ weight
    return product.view(heads, batch, tokens, -1).transpose(0, 1)


def _of_all_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply `x` `[B, 1, N, R]` by the transpose of `weight` `[H, D, R]`: `[B, H, N, D]`."""
    product = F.linear(x[:, 0], weight.reshape(-1, weight.shape[-1]))
    return product.unflatten(-1, weight.shape[:2]).transpose(1, 2)
