"""TurboQuant: a norm a block of channels, and one code a channel in the Lloyd-Max codebook of the unit normal.

What is stored should be rotated (`rotate`), which makes channels nearly normal. As in the authors' released code there
is one codebook, no polar angles and no sign bits, and no second stage for the residual (QJL).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from qattn_kernels.stores.channel_block import LARGEST, ChannelBlockStore

# The positive levels of the optimal (Lloyd-Max) quantizer of the unit normal, the largest of them, and all as INT8
# shares of it: symmetric, so that products of integers are exact about them. Rounding them so costs 0.0003, 0.12 and
# 0.14 % more MSE of a normal number than the levels themselves at 2, 3 and 4 bits.
LARGEST_LEVEL = {2: 1.5104176, 3: 2.1519457, 4: 2.7325896}
LEVELS = {2: (38, 127), 3: (14, 45, 79, 127), 4: (6, 18, 31, 44, 58, 75, 96, 127)}
UNIT = 64.0  # levels are INT8 / 64: then the scale is about the deviation of a channel, well inside fp16


def midpoints(bits: int) -> list[float]:
    """Between neighbouring positive levels, for unit deviation, in fp32."""
    levels = LEVELS[bits]
    return [(a + b) * (LARGEST_LEVEL[bits] / 254) for a, b in pairwise(levels)]


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum of the last dimension, a power of two, neighbours first: every implementation must take this order."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


@dataclass(frozen=True)
class TurboQuantStore(ChannelBlockStore):
    """The nearest level of `x / deviation` for each channel; the scale is the block's norm over that of its levels, so
    that the restored block has the norm it had.

    Attributes:
        bits: 2, 3 or 4. Codes count the levels from the lowest.
        norm_block: channels that share a norm, 0 all; never more than are rotated together, the largest power of two
            that divides the head dim.
    """

    norm_block: int = 32

    name = "turboquant"

    def group(self, dim: int) -> int:
        return min(self.norm_block or dim, dim & -dim)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        squares = tree_sum(x * x)
        deviation = torch.sqrt(squares * (1 / x.shape[-1]))[..., None]
        size = sum((x.abs() > middle * deviation).to(torch.uint8) for middle in midpoints(self.bits))
        half = len(LEVELS[self.bits])
        code = torch.where(x < 0, half - 1 - size, half + size)
        norm = self._integers(code).square().sum(-1)  # of integers below 2^24: exact in any order
        return code, (torch.sqrt(squares / norm) * UNIT).clamp(max=LARGEST).half()

    def levels(self, code: torch.Tensor) -> torch.Tensor:
        return self._integers(code) / UNIT

    def _integers(self, code: torch.Tensor) -> torch.Tensor:
        half = LEVELS[self.bits]
        table = torch.tensor([-x for x in reversed(half)] + list(half), dtype=torch.float32, device=code.device)
        return table[code.long()]


STORE = TurboQuantStore
