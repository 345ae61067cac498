"""NF4: one scale per block of channels, one code per channel among 16 quantiles of the normal distribution.

QLoRA (Dettmers et al. 2023), section 3 and appendix E. The paper's fp32 scales cost half a bit per value and are
quantized again; that double quantization is omitted here. 16-bit scales cost a quarter of a bit at the same block of
64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist

import torch

from qattn_kernels.formats.channel_block.reference import CodebookFormat
from qattn_kernels.formats.scales import from_bits, to_bits

# Outermost quantile, half a step inside: the average for 16 levels above zero and 15 below.
OFFSET = 1 - (1 / 32 + 1 / 30) / 2
TOP = 127  # INT8 levels are the paper's times this, rounded: an error of at most 0.4 % of a block's largest value


@lru_cache(maxsize=1)
def quantiles() -> tuple[float, ...]:
    """Return the paper's levels from -1 to 1, ascending: seven below zero, zero, and eight above.

    Each half consists of quantiles at even steps from `OFFSET` down to the median, relative to the largest."""
    positive, negative = (
        [NormalDist().inv_cdf(OFFSET + (0.5 - OFFSET) * i / count) for i in range(count)] for count in (8, 7)
    )
    levels = [*(-x for x in negative), 0.0, *reversed(positive)]
    return tuple(x / levels[-1] for x in levels)


def integers() -> tuple[int, ...]:
    """Return the levels as INT8, so that integer products with them are exact."""
    return tuple(round(x * TOP) for x in quantiles())


def midpoints() -> tuple[float, ...]:
    """Return the midpoints between neighbouring INT8 levels, relative to the scale."""
    return tuple((a + b) / (2 * TOP) for a, b in pairwise(integers()))


@dataclass(frozen=True)
class Nf4Format(CodebookFormat):
    """NF4: a 16-bit `scale = max|x|` per block of channels of a token, and one code per channel.

    A channel's code is the nearest level of `x / scale`.

    Attributes:
        group_size: channels that share a scale: 32, 64 or 128, at most the next power of two of the head dimension.
    """

    group_size: int = 64

    name = "nf4"
    unit = 1 / TOP

    def group(self, dim: int) -> int:
        return min(self.group_size, 1 << (dim - 1).bit_length())

    def table(self) -> tuple[int, ...]:
        return integers()

    def encode(self, x: torch.Tensor, channels: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        scale = to_bits(x.abs().amax(-1))
        whole = from_bits(scale)[..., None]
        code = torch.zeros_like(x, dtype=torch.uint8)
        for middle in midpoints():
            code += x > whole * middle
        return code, scale
