"""TurboQuant: a norm a block of channels, and one code a channel in the Lloyd-Max codebook of the unit normal.

What is stored should be rotated (`rotate`), which makes channels nearly normal. As in the authors' released code there
is one codebook, no polar angles and no sign bits, and no second stage for the residual (QJL).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qattn_kernels.formats.channel_block.reference import CodebookFormat
from qattn_kernels.formats.lloyd_max import LEVELS, UNIT, codebook, midpoints
from qattn_kernels.formats.scales import to_bits


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum of the last dimension, a power of two, neighbours first: every implementation must take this order."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


@dataclass(frozen=True)
class TurboQuantFormat(CodebookFormat):
    """The nearest level of `x / deviation` for each channel; the scale is the block's norm over that of its levels, so
    that the restored block has the norm it had.

    Attributes:
        bits: 2, 3 or 4. Codes count the levels from the lowest.
        norm_block: channels that share a norm, 0 all; never more than are rotated together, the largest power of two
            that divides the head dim.
    """

    norm_block: int = 32

    name = "turboquant"
    unit = UNIT

    def group(self, dim: int) -> int:
        return min(self.norm_block or dim, dim & -dim)

    def table(self) -> tuple[int, ...]:
        return tuple(codebook(self.bits))

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        squares = tree_sum(x * x)
        deviation = torch.sqrt(squares * (1 / x.shape[-1]))[..., None]
        size = sum((x.abs() > middle * deviation).to(torch.uint8) for middle in midpoints(self.bits))
        half = len(LEVELS[self.bits])
        code = torch.where(x < 0, half - 1 - size, half + size)
        norm = self.integers(code).square().sum(-1)  # of integers below 2^24: exact in any order
        return code, to_bits(torch.sqrt(squares / norm) / UNIT)


FORMAT = TurboQuantFormat
