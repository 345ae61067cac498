"""A random rotation of head dims in plain PyTorch: the specification.

Channels get random signs, then a Walsh-Hadamard transform. It spreads an outlier channel over all channels, so that one
scale fits a token better. Queries and keys rotate alike, which keeps their products; the output is rotated back if
values were rotated.

Equalized keys multiply each key channel by a constant before the rotation and each query channel by its inverse. The
rotation then spreads channels by their weight in the products, not only by the size of the keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

import torch

from qattn_kernels.layer.spec import Compute
from qattn_kernels.layout import State

Rotate = Callable[[list[torch.Tensor], list[torch.Tensor | None]], Iterable[torch.Tensor]]

SEED = 0  # of the signs; fixed, because a cache must be read with the signs that it was written with


@lru_cache(maxsize=64)
def signs(dim: int, device: torch.device) -> torch.Tensor:
    """fp32 `[dim]` of 1 and -1."""
    ones = torch.randint(0, 2, (dim,), generator=torch.Generator().manual_seed(SEED), device="cpu") * 2 - 1
    with torch.inference_mode(False):  # the cache outlives the first call
        return ones.float().to(device)


def transform(x: torch.Tensor) -> torch.Tensor:
    """Orthonormal Walsh-Hadamard transform of fp32 `[..., D]`, in blocks of the largest power of two that divides D.

    A stage adds and subtracts neighbours, and writes sums to the front half and differences to the back half. All
    stages are therefore alike. The order of additions is fixed: a token's result does not depend on its call, and
    every implementation agrees.
    """
    size = x.shape[-1] & -x.shape[-1]
    blocks = x.unflatten(-1, (-1, size))
    for _ in range(size.bit_length() - 1):
        one, other = blocks[..., 0::2], blocks[..., 1::2]
        blocks = torch.cat([one + other, one - other], -1)
    return (blocks * (1 / math.sqrt(size))).flatten(-2)


def rotate(x: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Rotate `[..., D]` in fp32. The result has the input's dtype.

    Args:
        factors: fp32 `[Hkv, D]`, for `x` `[B, H, T, D]`: multiply the channels before the rotation. Each group of
            `H / Hkv` heads shares its factors.
    """
    first = signs(x.shape[-1], x.device)
    if factors is not None:
        first = (first * factors).repeat_interleave(x.shape[1] // len(factors), 0)[:, None]
    return transform(x.float() * first).to(x.dtype)


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """Invert `rotate`."""
    return (transform(x.float()) * signs(x.shape[-1], x.device)).to(x.dtype)


def rotated(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, compute: Compute, state: State, rotate: Rotate
) -> Iterator[torch.Tensor]:
    """Return query, key and value as the layer multiplies and stores them.

    Args:
        state: the layer's state, which has the constants of equalized keys.
        rotate: rotates a list of tensors. It is called once, for all tensors that need a rotation.
    """
    of_keys, of_queries = state["k.equalizer"] if compute.equalize else (None, None)
    sides = [(query, compute.rotate, of_queries), (key, compute.rotate, of_keys), (value, compute.rotate_v, None)]
    return _rotated(sides, rotate)


def stored(
    key: torch.Tensor, value: torch.Tensor, compute: Compute, state: State, rotate: Rotate
) -> Iterator[torch.Tensor]:
    """Return only the key and value of `rotated`."""
    of_keys = state["k.equalizer"][0] if compute.equalize else None
    return _rotated([(key, compute.rotate, of_keys), (value, compute.rotate_v, None)], rotate)


def _rotated(sides: list[tuple[torch.Tensor, str, torch.Tensor | None]], rotate: Rotate) -> Iterator[torch.Tensor]:
    given = [(x, factors) for x, rotation, factors in sides if rotation == "hadamard"]
    turned = iter(rotate([x for x, _ in given], [factors for _, factors in given]))
    return (x if rotation == "none" else next(turned) for x, rotation, _ in sides)
