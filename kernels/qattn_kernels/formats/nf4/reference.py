"""NF4: a scale a block of channels, and one code a channel among 16 quantiles of the normal distribution.

QLoRA (Dettmers et al. 2023), section 3 and appendix E. Its double quantization of scales is left out: theirs are fp32
and cost half a bit a value, ours have 16 bits and cost a quarter of one at the same block of 64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist

import torch

from qattn_kernels.formats.channel_block.reference import CodebookFormat
from qattn_kernels.formats.scales import from_bits, to_bits

# The outermost quantile lies half a step inside: that of 16 levels above zero and of 15 below, averaged.
OFFSET = 1 - (1 / 32 + 1 / 30) / 2
TOP = 127  # INT8 levels are the paper's times this, rounded: at most 0.4 % of the largest value of a block


@lru_cache(maxsize=1)
def quantiles() -> tuple[float, ...]:
    """The paper's levels, from -1 to 1, ascending: seven below zero, zero, and eight above, each half of them quantiles
    at even steps from `OFFSET` down to the median, in shares of the largest."""
    positive, negative = (
        [NormalDist().inv_cdf(OFFSET + (0.5 - OFFSET) * i / count) for i in range(count)] for count in (8, 7)
    )
    levels = [*(-x for x in negative), 0.0, *reversed(positive)]
    return tuple(x / levels[-1] for x in levels)


def integers() -> tuple[int, ...]:
    """The levels as INT8, so that products of integers are exact about them."""
    return tuple(round(x * TOP) for x in quantiles())


def midpoints() -> tuple[float, ...]:
    """Between neighbouring INT8 levels, in shares of the scale."""
    return tuple((a + b) / (2 * TOP) for a, b in pairwise(integers()))


@dataclass(frozen=True)
class Nf4Format(CodebookFormat):
    """`scale = max|x|` of a block of channels of a token, in 16 bits. A channel gets the nearest level of `x / scale`.

    Attributes:
        group_size: channels that share a scale: 32, 64 or 128; at most the next power of two of the head dim.
    """

    group_size: int = 64

    name = "nf4"
    unit = 1 / TOP

    def group(self, dim: int) -> int:
        return min(self.group_size, 1 << (dim - 1).bit_length())

    def table(self) -> tuple[int, ...]:
        return integers()

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = to_bits(x.abs().amax(-1))
        whole = from_bits(scale)[..., None]
        code = torch.zeros_like(x, dtype=torch.uint8)
        for middle in midpoints():
            code += x > whole * middle
        return code, scale


FORMAT = Nf4Format
