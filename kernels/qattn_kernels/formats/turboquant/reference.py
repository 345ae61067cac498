"""TurboQuant: a norm a block of channels, and one code a channel in the Lloyd-Max codebook of the unit normal.

What is stored should be rotated (`rotate`), which makes channels nearly normal. As in the authors' released code there
is one codebook, no polar angles and no sign bits, and no second stage for the residual (QJL).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from qattn_kernels.formats.channel_block.reference import LARGEST, ChannelBlockFormat
from qattn_kernels.formats.lloyd_max import LEVELS, UNIT, codebook, midpoints


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum of the last dimension, a power of two, neighbours first: every implementation must take this order."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


@dataclass(frozen=True)
class TurboQuantFormat(ChannelBlockFormat):
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

    def laid(self, packed: torch.Tensor) -> torch.Tensor:
        """Of four neighbouring bytes the lower halves come first, then the upper ones: what a table looks up at once
        are the four codes in half a word (`formats/codebook.py`)."""
        one, other = packed[..., 0::2], packed[..., 1::2]
        halves = torch.stack(((one & 15) | (other & 15) << 4, (one >> 4) | (other & 240)), -2)
        return halves.unflatten(-1, (-1, 2)).transpose(-2, -3).flatten(-3)

    def taken(self, codes: torch.Tensor) -> torch.Tensor:
        low, high = codes.unflatten(-1, (-1, 2, 2)).transpose(-2, -3).flatten(-2).unbind(-2)
        one, other = (low & 15) | (high & 15) << 4, (low >> 4) | (high & 240)
        return torch.stack((one, other), -1).flatten(-2)

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        squares = tree_sum(x * x)
        deviation = torch.sqrt(squares * (1 / x.shape[-1]))[..., None]
        size = sum((x.abs() > middle * deviation).to(torch.uint8) for middle in midpoints(self.bits))
        half = len(LEVELS[self.bits])
        code = torch.where(x < 0, half - 1 - size, half + size)
        norm = self._integers(code).square().sum(-1)  # of integers below 2^24: exact in any order
        return code, (torch.sqrt(squares / norm) / UNIT).clamp(max=LARGEST).half()

    def levels(self, code: torch.Tensor) -> torch.Tensor:
        return self._integers(code) * UNIT

    def _integers(self, code: torch.Tensor) -> torch.Tensor:
        return _table(self.bits, code.device)[code.long()]


@lru_cache(maxsize=64)
def _table(bits: int, device: torch.device) -> torch.Tensor:
    """The codebook in fp32, made once: a captured step copies nothing from the host."""
    with torch.inference_mode(False):
        return torch.tensor(codebook(bits), dtype=torch.float32, device=device)


FORMAT = TurboQuantFormat
