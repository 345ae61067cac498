"""Which tokens share a scale: the granularities of SageAttention2 (section 3.3).

`token`: each has its own. `thread`: those whose products one thread of a tensor core holds; keys of a block whose
places `n` agree in `(n % 8) // 2`, queries of 32 that agree in `n % 8`. `block`: all keys of a block of 64, all queries
of 128 or so. `tensor`: all of a row and head.
"""

from __future__ import annotations

import torch

KEY_BLOCK, QUERY_BLOCK = 64, 128


def key_groups(granularity: str, tokens: int, device: torch.device) -> torch.Tensor:
    """The group, int64 `[tokens]`, of each key of a block of so many. By `thread` keys 0 and 1 have group 0, keys 2 and
    3 group 1, keys 8 and 9 group 0 again."""
    n = torch.arange(tokens, device=device)
    if granularity == "thread":
        return n // KEY_BLOCK * 4 + n % 8 // 2
    return {"token": n, "block": n // KEY_BLOCK, "tensor": n * 0}[granularity]


def key_scales(granularity: str, tokens: int) -> int:
    """How many scales a block of so many keys has, one a group."""
    return {"token": tokens, "thread": tokens // KEY_BLOCK * 4, "block": tokens // KEY_BLOCK, "tensor": 1}[granularity]


def query_groups(granularity: str, tokens: int, device: torch.device, block: int = QUERY_BLOCK) -> torch.Tensor:
    """The group, int64 `[tokens]`, of each query: by `thread` queries 0, 8, 16 and 24 have group 0, queries 32, 40, ...
    group 8. `block` of them share a group if that is the granularity."""
    n = torch.arange(tokens, device=device)
    if granularity == "thread":
        return n // 32 * 8 + n % 8
    return {"token": n, "block": n // block, "tensor": n * 0}[granularity]


def grouped_maximum(top: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The largest `top` `[..., tokens]` of each token's group; `groups` `[tokens]` are below the number of tokens."""
    most = torch.zeros_like(top)  # as many groups as tokens at most: no wait for a device
    index = groups.expand(top.shape)
    return most.scatter_reduce(-1, index, top, "amax").gather(-1, index)


def shared_maximum(top: torch.Tensor, granularity: str) -> torch.Tensor:
    """The largest `top` `[..., tokens]` of each key's group in a block of keys."""
    return grouped_maximum(top, key_groups(granularity, top.shape[-1], top.device))
