"""Exact attention with an online softmax: FlashAttention-2 (Dao 2023), Algorithm 1; and what the other papers share.

Departures: the paper rescales `l` and `O` by `exp(m_old - m_new)` at every tile. These factors multiply out, since
`exp(m_1 - m_2) exp(m_2 - m_3) = exp(m_1 - m_3)`, so a tile here keeps what it found under its own maximum, and `merge`
scales all of them to the last maximum at once. Split-KV (FlashDecoding) merges its splits by the same formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import pad


class Tile(NamedTuple):
    """What one tile gives a block of queries: `m`, `l` fp32 `[G, B_r]` and `O` fp32 `[G, B_r, d]`."""

    m: torch.Tensor
    l: torch.Tensor
    O: torch.Tensor


class Result(NamedTuple):
    """Output `O` fp32 `[G, N_q, d]` and log-sum-exp `L` fp32 `[G, N_q]`."""

    O: torch.Tensor
    L: torch.Tensor


def flash_attention(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, B_r: int = 64, B_c: int = 64) -> Result:
    """Causal attention of the last queries `[G, N_q, d]` over `K`, `V` `[N, d]`, in fp32."""
    K_tiles, V_tiles = in_tiles(K.float(), B_c), in_tiles(V.float(), B_c)
    blocks = []
    for Q_i, i in query_blocks(Q, len(K), B_r):  # line 3
        tiles = []
        for j in visible_tiles(i, B_c):  # line 6
            S = mask(Q_i @ K_tiles[j].mT, i, j)  # line 8
            m = S.amax(-1)  # line 9, of the tile alone
            P = torch.exp(below(S, m))
            tiles.append(Tile(m, P.sum(-1), P @ V_tiles[j]))  # lines 9 and 10
        blocks.append(merge(tiles))  # lines 12 and 13
    return join(blocks)


def merge(tiles: list[Tile]) -> Result:
    """`O = sum_j exp(m_j - m) O_j / l` with `l = sum_j exp(m_j - m) l_j`, `m = max_j m_j`; and `L = m + log(l)`."""
    m_j, l_j, O_j = torch.stack([t.m for t in tiles], -1), torch.stack([t.l for t in tiles], -1), [t.O for t in tiles]
    m = m_j.amax(-1)
    rescale = torch.exp(m_j - m[..., None])
    l = (l_j * rescale).sum(-1)
    return Result((torch.stack(O_j, -2) * rescale[..., None]).sum(-2) / l[..., None], m + l.log())


def join(blocks: list[Result]) -> Result:
    """Concatenate the results of all blocks of queries."""
    return Result(torch.cat([block.O for block in blocks], 1), torch.cat([block.L for block in blocks], 1))


def query_blocks(Q: torch.Tensor, N: int, B_r: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Blocks `[G, B_r, d]` of the queries `[G, N_q, d]`, in fp32, and the positions of their tokens among the `N`."""
    positions = torch.arange(N - Q.shape[1], N)
    for start in range(0, Q.shape[1], B_r):
        yield Q[:, start : start + B_r].float().contiguous(), positions[start : start + B_r]


def in_tiles(X: torch.Tensor, B_c: int) -> torch.Tensor:
    """`[N, ...]` as tiles `[T_c, B_c, ...]`; the last one is filled with zeros, which no query sees."""
    behind = -len(X) % B_c
    return pad(X, (*[0] * (2 * X.dim() - 1), behind)).unflatten(0, (-1, B_c))


def visible_tiles(i: torch.Tensor, B_c: int) -> range:
    """The tiles that some query of a block at positions `i` sees."""
    return range(int(i[-1]) // B_c + 1)


def mask(S: torch.Tensor, i: torch.Tensor, j: int) -> torch.Tensor:
    """Scores `[..., B_r, B_c]` of queries at positions `i` and tile `j`: -inf where the key comes after the query."""
    B_c = S.shape[-1]
    return S.masked_fill(torch.arange(j * B_c, (j + 1) * B_c) > i[:, None], -torch.inf)


def below(S: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """`S - m` of a row's maximum `[..., B_r]`; -inf where a query sees nothing of the tile."""
    return S - torch.where(m.isneginf(), 0.0, m)[..., None]
