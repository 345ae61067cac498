"""Granularities of scales in SageAttention2 (section 3.3): which tokens share a scale.

- `token`: every token has its own scale.
- `thread`: tokens whose products one thread of a tensor core holds share a scale. For keys of a block, these have equal
  `(n % 8) // 2` at position `n`. For 32 consecutive queries, they have equal `n % 8`.
- `block`: all keys of a block of 64, and all queries of a block of about 128.
- `tensor`: all tokens of a row and head."""

from __future__ import annotations

import torch

KEY_BLOCK, QUERY_BLOCK = 64, 128


def key_groups(granularity: str, tokens: int, device: torch.device) -> torch.Tensor:
    """Return the group, int64 `[tokens]`, of each key of a block.

    With `thread`, keys 0 and 1 are in group 0, keys 2 and 3 in group 1, keys 8 and 9 in group 0 again."""
    n = torch.arange(tokens, device=device)
    if granularity == "thread":
        return n // KEY_BLOCK * 4 + n % 8 // 2
    return {"token": n, "block": n // KEY_BLOCK, "tensor": n * 0}[granularity]


def key_scales(granularity: str, tokens: int) -> int:
    """Return the number of scales, one per group, for a block of `tokens` keys."""
    return {"token": tokens, "thread": tokens // KEY_BLOCK * 4, "block": tokens // KEY_BLOCK, "tensor": 1}[granularity]


def query_groups(granularity: str, tokens: int, device: torch.device, block: int = QUERY_BLOCK) -> torch.Tensor:
    """Return the group, int64 `[tokens]`, of each query.

    With `thread`, queries 0, 8, 16 and 24 are in group 0, and queries 32, 40, ... in group 8. With `block`, each
    `block` queries share a group."""
    n = torch.arange(tokens, device=device)
    if granularity == "thread":
        return n // 32 * 8 + n % 8
    return {"token": n, "block": n // block, "tensor": n * 0}[granularity]


def grouped_maximum(top: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the largest `top` `[..., tokens]` in each token's group. Entries of `groups` `[tokens]` are below
    `tokens`."""
    most = torch.zeros_like(top)  # sized by tokens, the maximum number of groups: avoids a device sync
    index = groups.expand(top.shape)
    return most.scatter_reduce(-1, index, top, "amax").gather(-1, index)


def shared_maximum(top: torch.Tensor, granularity: str) -> torch.Tensor:
    """Return the largest `top` `[..., tokens]` in each key's group, for a block of keys."""
    return grouped_maximum(top, key_groups(granularity, top.shape[-1], top.device))
