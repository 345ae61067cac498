"""A random rotation of head dims: signs, then a Walsh-Hadamard transform. Queries and keys turned alike keep their
products, and a channel that stands out is spread over all, so that one scale fits a token better.

Plain PyTorch on every device.
"""

from __future__ import annotations

from functools import lru_cache

import torch

SEED = 0  # of the signs: a cache is read with those it was written with


@lru_cache(maxsize=64)
def rotation(dim: int, device: torch.device) -> torch.Tensor:
    """fp64 `[dim, dim]`, orthonormal: `x @ rotation` has the signs first, then the transform over the largest power of
    two that divides `dim`, in as many blocks as that takes."""
    size = dim & -dim
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (dim,), generator=torch.Generator().manual_seed(SEED)) * 2 - 1
    whole = signs[:, None] * torch.block_diag(*[matrix] * (dim // size)) / size**0.5
    with torch.inference_mode(False):  # it outlives the call that asked first
        return whole.to(device)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """`[..., D]` rotated, in its own dtype.

    In fp64: rounded from there a token does not depend on the order of the sums, and so not on the shape of its call.
    """
    return (x.double() @ rotation(x.shape[-1], x.device)).to(x.dtype)
