"""Tiles: blocks of stored tokens in the form of their format, each token with the range of queries that see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from qattn_kernels.formats import Operand
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import side_of
from qattn_kernels.layout import State
from qattn_kernels.reference.rows import bits_to_bool

FOREVER = 2**31 - 1  # a row position that no query reaches


class Tiles(NamedTuple):
    """`n` tiles of stored tokens in order of their row positions.

    A token may occur twice, in the ring and in its packed block. Each query sees one of the two copies.

    Attributes:
        k, v: keys and values `[B, Hkv, n, block, D]`.
        pos: int32 `[B, Hkv or 1, n, block]`, row position of the token.
        since, until: shaped like `pos`, first and last query position that sees this copy. `since` is `FOREVER` for an
            empty slot.
        keep: bool `[B, Hkv, n, block]`, false for masked tokens, such as those with a non-finite key or value.
        k_exact: fp32 shaped like `k`, smoothed keys before quantization, for smoothed queries; else None.
    """

    k: Operand
    v: Operand
    pos: torch.Tensor
    since: torch.Tensor
    until: torch.Tensor
    keep: torch.Tensor
    k_exact: torch.Tensor | None = None

    def first(self, n: int) -> Tiles:
        """Return the first `n` tiles."""
        return self.map(lambda x: x[:, :, :n])

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Tiles:
        """Apply `move`, for example an index of tiles, to all tensors."""
        rest = (None if x is None else move(x) for x in self[2:])
        return Tiles(self.k.map(move), self.v.map(move), *rest)  # type: ignore[arg-type]

    def latent(self) -> Tiles:
        """Return the tiles for `LayerSpec.latent`: keys are the values followed by the stored keys, all dequantized."""
        v = self.v.dequantize()
        return self._replace(k=Operand(torch.cat([v, self.k.dequantize()], -1), None), v=Operand(v, None))

    def joined(self, other: Tiles) -> Tiles:
        """Return these tiles followed by `other`."""

        def each(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            heads = max(a.shape[1], b.shape[1])
            return torch.cat([x.expand(-1, heads, -1, -1) for x in (a, b)], 2)

        pos, since, until = (each(a, b) for a, b in zip(self[2:5], other[2:5], strict=True))
        keep = torch.cat([self.keep, other.keep], 2)
        return Tiles(joined_side(self.k, other.k), joined_side(self.v, other.v), pos, since, until, keep)


def joined_side(a: Operand, b: Operand) -> Operand:
    """Return the tiles `a` followed by `b`, `[B, Hkv, n, block, D]`.

    Numbers without scales are joined to scaled ones with scale 1, and tiles without a mean to centered ones with
    mean 0."""
    if (a.scale is None) != (b.scale is None):
        a, b = a.scaled(), b.scaled()
    if (a.mean is None) != (b.mean is None):
        a, b = a.centered(), b.centered()
    scale, mean = (None if x is None or y is None else torch.cat([x, y], 2) for x, y in zip(a[1:], b[1:], strict=True))
    if a.x.stride(3) < a.x.stride(4):  # keep the layout: a change of layout takes longer than the copy
        return Operand(torch.cat([a.x.mT, b.x.mT], 2).mT, scale, mean)
    return Operand(torch.cat([a.x, b.x], 2), scale, mean)


def visible(tiles: Tiles, q_pos: torch.Tensor, window: int) -> torch.Tensor:
    """Return which tokens each query sees, bool `[B, Hkv, T, n, block]`: causal, and inside its `window` (`Scores`).

    `q_pos` int32 `[B, T]`: row positions of the queries, negative for padding, which sees nothing."""
    q = q_pos[:, None, :, None, None]
    see = (tiles.since[:, :, None] <= q) & (q <= tiles.until[:, :, None]) & (q >= 0)
    if window:
        see &= tiles.pos[:, :, None] > last_hidden(q, window)
    return see & tiles.keep[:, :, None]


def last_hidden(q_pos: torch.Tensor, window: int) -> torch.Tensor:
    """Return the last row position before the window of queries at `q_pos`, or for `window = -n` before their chunk."""
    return q_pos - window if window > 0 else q_pos - q_pos % -window - 1


def packed_tiles(state: State, spec: LayerSpec, closed: torch.Tensor) -> Tiles:
    """Return the first `closed` `[B]` blocks of each row as tiles, dequantized as far as a product needs.

    Every query sees them. On a CPU, where lengths are known, there are as many tiles as the fullest row has blocks.
    Elsewhere there are tiles for the whole capacity, with `since = FOREVER` where a row has no block."""
    capacity = state["block_len"].shape[1]
    blocks = int(closed.max()) if closed.device.type == "cpu" else capacity
    start, length = (state[name][:, :blocks, None] for name in ("block_pos", "block_len"))
    offset = torch.arange(spec.window.block, device=start.device, dtype=torch.int32)
    index = torch.arange(start.shape[1], device=start.device)
    valid = (offset < length) & (index < closed[:, None])[..., None]
    since = torch.where(valid, 0, FOREVER).int()
    keep = ~bits_to_bool(state["dropped"][:, :, :blocks])
    k, v = (fmt.read(side_of(state, side), blocks) for side, fmt in (("k", spec.k), ("v", spec.v)))
    since = since[:, None]
    return Tiles(k, v, (start + offset)[:, None], since, torch.full_like(since, FOREVER), keep)
