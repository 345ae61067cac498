"""TurboQuant: one norm per block of channels, one code per channel in the Lloyd-Max codebook of the unit normal.

Rotate tokens before storing them (`rotate`): rotation makes channels nearly normal. This follows the authors' released
code: one codebook, without polar angles, sign bits or a second stage for the residual (QJL)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qattn_kernels.formats.channel_block.reference import LEAST_GROUP, CodebookFormat
from qattn_kernels.formats.lloyd_max import LEVELS, UNIT, codebook, midpoints
from qattn_kernels.formats.scales import to_bits


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum over the last dimension, a power of two, adding neighbours first. Every implementation uses this
    order."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


@dataclass(frozen=True)
class TurboQuantFormat(CodebookFormat):
    """TurboQuant: the nearest level of `x / deviation` per channel.

    The scale is the block's norm divided by the norm of its levels, so a restored block keeps its norm.

    Attributes:
        bits: 2, 3 or 4. Codes number the levels from the lowest.
        norm_block: channels that share a norm, 0 for all that are rotated together: the largest power of two that
            divides the head dimension. At most those, but 32 if fewer are rotated together.
    """

    norm_block: int = 32

    name = "turboquant"
    unit = UNIT

    def group(self, dim: int) -> int:
        rotated = max(dim & -dim, LEAST_GROUP)
        return min(self.norm_block or rotated, rotated)

    def table(self) -> tuple[int, ...]:
        return tuple(codebook(self.bits))

    def encode(self, x: torch.Tensor, channels: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        squares = tree_sum(x * x)
        deviation = torch.sqrt(squares / (x.shape[-1] if channels is None else channels))[..., None]
        size = sum((x.abs() > middle * deviation).to(torch.uint8) for middle in midpoints(self.bits))
        half = len(LEVELS[self.bits])
        code = torch.where(x < 0, half - 1 - size, half + size)
        level = self.integers(code)
        if channels is not None:
            level = torch.where(torch.arange(x.shape[-1], device=x.device) < channels[:, None], level, 0.0)
        norm = level.square().sum(-1)  # integers below 2^24: exact in any order
        return code, to_bits(torch.sqrt(squares / norm) / UNIT)
