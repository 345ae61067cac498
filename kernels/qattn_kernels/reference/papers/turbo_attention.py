"""TurboAttention (Kang et al.): Algorithm 1, prefill, and Algorithm 2, decode over the packed cache.

`X^q1` are INT8 codes, `X^q2` codes of 4 or 2 bits of these with integer scale and zero point a channel (FlashQ,
section 3.1). `s`, `s_int`, `z_int` are the paper's `s`, `s^int`, `z^int`; `quantize`, `first_stage` and `second_stage`
are `int8_tokens`, `stage_one` and `stage_two` of the project.

Departures, where the algorithms are incomplete or wrong:
- A token first gets INT8 codes with its own scale. A full block then gets one scale, the largest of its tokens, so that
  codes do not depend on how tokens arrived. A block that is not full keeps the tokens' scales. The buffer of section
  3.3 has one scale for all tokens, which would clamp later ones.
- `s_int` is at least 1. `z_int` is added instead of multiplied, and centred, so that dequantized codes fit INT8:
  Algorithm 1 rounds `min / s_int`, and Eq. 3 has `z = min`.
- Weights are scaled by the row's maximum in the tile. `p_scale="tile"` uses one scale per tile, as in the paper.
- `O` is multiplied by the rescale factor instead of divided. The factor is an exact exponential (`merge`), because
  SAS(0) is 0.9996 and would fade earlier tiles at every step.
- Scores are relative to the tile's maximum. SAS, whose cut depends on the maximum, and `p_scale="tile"` use the running
  maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from qattn_kernels.reference.papers.online_softmax import (
    Result,
    Tile,
    below,
    in_tiles,
    join,
    mask,
    merge,
    query_blocks,
    visible_tiles,
)
from qattn_kernels.reference.softmax import sas_exp

R = 119.0  # largest INT8 code (Algorithm 1)


@dataclass(frozen=True)
class Settings:
    """Bits of keys and of values, tiles, buffer, and the softmax: `n_r` is the cut of SAS."""

    k_bits: int = 4
    v_bits: int = 4
    B_r: int = 64
    B_c: int = 64
    buffer: int = 64
    p_scale: str = "row"
    softmax: str = "exact"
    n_r: float = -6.0


class Int8(NamedTuple):
    """`X^q1`, whole numbers in fp32 `[tokens, d]`, and a scale a token `[tokens]`: `X = X^q1 * s`."""

    q1: torch.Tensor
    s: torch.Tensor

    def tiles(self, B_c: int) -> list[Int8]:
        """Tiles of `B_c` tokens, the last one filled with zeros."""
        return [Int8(*tile) for tile in zip(in_tiles(self.q1, B_c), in_tiles(self.s, B_c), strict=True)]

    def then(self, later: Int8) -> Int8:
        """These tokens, then `later` ones."""
        return Int8(torch.cat([self.q1, later.q1]), torch.cat([self.s, later.s]))


class Packed(NamedTuple):
    """A block of the cache: codes `q2` `[B_c, d]`, integers `s_int`, `z_int` `[d]`, and the scale `s` of the block."""

    q2: torch.Tensor
    s_int: torch.Tensor
    z_int: torch.Tensor
    s: torch.Tensor

    def dequantize(self) -> Int8:
        """Eq. 7 and Algorithm 2: `X^q1 = X^q2 * s^int + z^int`."""
        return Int8((self.q2 * self.s_int + self.z_int).float(), self.s.expand(len(self.q2)))


@dataclass
class Side:
    """Keys or values of a cache: packed blocks, and the INT8 buffer of the tokens that no block has yet."""

    packed: list[Packed]
    buffer: Int8

    def append(self, x: torch.Tensor, bits: int, settings: Settings) -> list[Int8]:
        """Write a token `[1, d]` into the buffer, and pack the buffer into blocks when it is full.

        Returns the tiles that the token's query reads. If the token closes a block, its query reads it from the buffer.
        """
        self.buffer = self.buffer.then(quantize(x))
        waiting, closing = self.buffer.tiles(settings.B_c), 0
        if len(self.buffer.s) == settings.buffer:
            self.packed += [second_stage(first_stage(X), bits) for X in waiting]
            self.buffer, closing = Int8(self.buffer.q1[:0], self.buffer.s[:0]), 1
            waiting = waiting[-1:]
        return [X.dequantize() for X in self.packed[: len(self.packed) - closing]] + waiting


class Cache(NamedTuple):
    """What Algorithm 1 leaves and Algorithm 2 reads."""

    K: Side
    V: Side


def quantize(X: torch.Tensor) -> Int8:
    """Eq. 9: `s = max|X| / 119`, `X^q1 = round(X / s)` of each token `[..., d]`."""
    s = X.float().abs().amax(-1) / R
    return Int8(torch.round(X.float() / s[..., None]), s)


def first_stage(X: Int8) -> Int8:
    """A full block `[B_c, d]` with one scale, the largest of its tokens."""
    s = X.s.amax()
    return Int8(torch.round(X.q1 * (X.s / s)[:, None]), s.expand(len(X.s)))


def second_stage(X: Int8, bits: int) -> Packed:
    """Eq. 10 and 3 in integers, a channel of the block at a time: `X^q2 = round((X^q1 - z^int) / s^int)`.

    `s^int = round((max - min) / (2^bits - 1))`, and `z^int` is `min`, moved by half of what that rounding leaves.
    """
    x, top = X.q1.int(), 2**bits - 1
    low, high = x.amin(0), x.amax(0)
    s_int = ((2 * (high - low) + top) // (2 * top)).clamp(min=1)
    z_int = low + ((high - low - s_int * top) >> 1)
    return Packed(torch.round((x - z_int) / s_int).clamp(0, top).int(), s_int, z_int, X.s[0])


def priority(X: Int8) -> float:
    """Eq. 11, of a head's first block: the head's gap times the deviation of its channels' gaps. Eq. 12: the heads of
    lowest priority get 2 bits."""
    x = X.q1.double() * X.s.double()[:, None]
    return float((x.max() - x.min()) * (x.amax(0) - x.amin(0)).std())


def prefill(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, settings: Settings) -> tuple[Result, Cache]:
    """Algorithm 1: `Q` `[G, N, d]`, `K`, `V` `[N, d]`, all of them new; returns the cache too."""
    B_c, N = settings.B_c, len(K)
    full = N // settings.buffer * settings.buffer // B_c  # tiles that become blocks
    K_tiles, V_tiles = quantize(K).tiles(B_c), quantize(V).tiles(B_c)
    for tiles in (K_tiles, V_tiles):
        tiles[:full] = map(first_stage, tiles[:full])
    blocks = []
    for Q_i, i in query_blocks(Q, N, settings.B_r):
        s_Q = Q_i.abs().amax((1, 2), keepdim=True) / R
        Q1 = torch.round(Q_i / s_Q)
        found: list[Tile] = []
        for j in visible_tiles(i, B_c):
            S = mask((Q1 @ K_tiles[j].q1.mT) * s_Q * K_tiles[j].s, i, j)
            found.append(weigh(S, V_tiles[j], found, settings, settings.p_scale))
        blocks.append(merge(found))
    sides = ((K, K_tiles, settings.k_bits), (V, V_tiles, settings.v_bits))
    cache = (Side([second_stage(X, bits) for X in t[:full]], quantize(x[full * B_c :])) for x, t, bits in sides)
    return join(blocks), Cache(*cache)


def decode(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, cache: Cache, settings: Settings) -> Result:
    """Algorithm 2: the query `[G, 1, d]` of one new token, whose `K`, `V` `[1, d]` enter the cache first."""
    K_tiles = cache.K.append(K, settings.k_bits, settings)
    V_tiles = cache.V.append(V, settings.v_bits, settings)
    s_Q = Q.abs().amax(-1, keepdim=True) / R
    Q1 = torch.round(Q / s_Q)
    i = torch.tensor([len(cache.K.packed) * settings.B_c + len(cache.K.buffer.s) - 1])
    found: list[Tile] = []
    for j, (K_j, V_j) in enumerate(zip(K_tiles, V_tiles, strict=True)):
        S = mask((Q1 @ K_j.q1.mT) * s_Q * K_j.s, i, j)
        found.append(weigh(S, V_j, found, settings, "row"))
    return merge(found)


def weigh(S: torch.Tensor, V: Int8, before: list[Tile], settings: Settings, p_scale: str) -> Tile:
    """What both algorithms do with the scores of a tile: `P = SAS(S - m)`, `l`, `Q(P)` and `O_j = s_P s_V Q(P) V^q1`.

    `s_V` is a token's in the buffer, so it is multiplied into `P` before that is rounded.
    """
    m = S.amax(-1)
    sas = settings.softmax == "sas"
    if before and (sas or p_scale == "tile"):
        m = torch.maximum(before[-1].m, m)
    P = sas_exp(below(S, m), settings.n_r) if sas else torch.exp(below(S, m))
    P_V = P * V.s
    s_P = P_V.amax((1, 2) if p_scale == "tile" else -1, keepdim=True) / R
    Q_P = torch.round(P_V / torch.where(s_P == 0, 1.0, s_P))  # zero where a query sees nothing of the tile
    return Tile(m, P.sum(-1), (Q_P @ V.q1) * s_P)
