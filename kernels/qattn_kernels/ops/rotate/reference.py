"""A random rotation of head dims in plain PyTorch: the specification.

Signs, then a Walsh-Hadamard transform. Queries and keys rotated alike keep their products, values are rotated back in
the output; a channel that stands out is spread over all, so that one scale fits a token better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

import torch

from qattn_kernels.layer.spec import Compute

Rotate = Callable[[list[torch.Tensor]], Iterable[torch.Tensor]]

SEED = 0  # of the signs: a cache is read with those it was written with


@lru_cache(maxsize=64)
def signs(dim: int, device: torch.device) -> torch.Tensor:
    """fp32 `[dim]` of 1 and -1."""
    ones = torch.randint(0, 2, (dim,), generator=torch.Generator().manual_seed(SEED), device="cpu") * 2 - 1
    with torch.inference_mode(False):  # they outlive the call that asked first
        return ones.float().to(device)


def transform(x: torch.Tensor) -> torch.Tensor:
    """Walsh-Hadamard transform of fp32 `[..., D]`, orthonormal, over the largest power of two that divides D, in as
    many blocks as that takes.

    Butterflies of neighbours, sums to the front and differences behind them, so that all stages are one. Each number is
    a tree of sums that nothing else shapes: a token does not depend on its call, and every implementation agrees.
    """
    size = x.shape[-1] & -x.shape[-1]
    blocks = x.unflatten(-1, (-1, size))
    for _ in range(size.bit_length() - 1):
        one, other = blocks[..., 0::2], blocks[..., 1::2]
        blocks = torch.cat([one + other, one - other], -1)
    return (blocks * (1 / math.sqrt(size))).flatten(-2)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """`[..., D]` rotated, computed in fp32, in its own dtype."""
    return transform(x.float() * signs(x.shape[-1], x.device)).to(x.dtype)


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """The inverse."""
    return (transform(x.float()) * signs(x.shape[-1], x.device)).to(x.dtype)


def rotated(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, compute: Compute, rotate: Rotate
) -> Iterator[torch.Tensor]:
    """Query, key and value as the layer multiplies and stores them; `rotate` is called once, with all that rotate."""
    return _rotated([(query, compute.rotate), (key, compute.rotate), (value, compute.rotate_v)], rotate)


def stored(key: torch.Tensor, value: torch.Tensor, compute: Compute, rotate: Rotate) -> Iterator[torch.Tensor]:
    """Key and value of `rotated`."""
    return _rotated([(key, compute.rotate), (value, compute.rotate_v)], rotate)


def _rotated(sides: list[tuple[torch.Tensor, str]], rotate: Rotate) -> Iterator[torch.Tensor]:
    turned = iter(rotate([x for x, rotation in sides if rotation == "hadamard"]))
    return (x if rotation == "none" else next(turned) for x, rotation in sides)
