"""A random rotation of head dims in plain PyTorch: the specification.

Signs, then a Walsh-Hadamard transform. Queries and keys rotated alike keep their products, values are rotated back in
the output; a channel that stands out is spread over all, so that one scale fits a token better. Where keys are
equalized each channel is multiplied by a constant before, and that of queries by its inverse: the rotation then spreads
channels by what they weigh in products, not by the size of keys alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

import torch

from qattn_kernels.layer.spec import Compute
from qattn_kernels.layout import State

Rotate = Callable[[list[torch.Tensor], list[torch.Tensor | None]], Iterable[torch.Tensor]]

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


def rotate(x: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
    """`[..., D]` rotated, computed in fp32, in its own dtype.

    Args:
        factors: fp32 `[Hkv, D]`, by which channels of `[B, H, T, D]` are multiplied before, those of `H / Hkv` heads
            in order alike.
    """
    first = signs(x.shape[-1], x.device)
    if factors is not None:
        first = (first * factors).repeat_interleave(x.shape[1] // len(factors), 0)[:, None]
    return transform(x.float() * first).to(x.dtype)


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """The inverse."""
    return (transform(x.float()) * signs(x.shape[-1], x.device)).to(x.dtype)


def rotated(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, compute: Compute, state: State, rotate: Rotate
) -> Iterator[torch.Tensor]:
    """Query, key and value as the layer multiplies and stores them.

    Args:
        state: the layer's, which has the constants of equalized keys. rotate: `rotate` of each; it is called once,
            with all that rotate.
    """
    of_keys, of_queries = state["k.equalizer"] if compute.equalize else (None, None)
    sides = [(query, compute.rotate, of_queries), (key, compute.rotate, of_keys), (value, compute.rotate_v, None)]
    return _rotated(sides, rotate)


def stored(
    key: torch.Tensor, value: torch.Tensor, compute: Compute, state: State, rotate: Rotate
) -> Iterator[torch.Tensor]:
    """Key and value of `rotated`."""
    of_keys = state["k.equalizer"][0] if compute.equalize else None
    return _rotated([(key, compute.rotate, of_keys), (value, compute.rotate_v, None)], rotate)


def _rotated(sides: list[tuple[torch.Tensor, str, torch.Tensor | None]], rotate: Rotate) -> Iterator[torch.Tensor]:
    given = [(x, factors) for x, rotation, factors in sides if rotation == "hadamard"]
    turned = iter(rotate([x for x, _ in given], [factors for _, factors in given]))
    return (x if rotation == "none" else next(turned) for x, rotation, _ in sides)
