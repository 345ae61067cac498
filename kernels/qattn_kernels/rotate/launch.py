"""Launches of the rotation."""

from __future__ import annotations

import math

import torch

from qattn_kernels.rotate.kernel import rotate_kernel
from qattn_kernels.rotate.reference import signs

NUMBERS = 2048  # of one program


def rotate(x: torch.Tensor, back: bool = False) -> torch.Tensor:
    """`[B, H, T, D]` rotated, or turned back, in its own dtype and order of memory."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty_like(x)
    batch, heads, tokens, dim = x.shape
    rows, size = batch * heads * tokens, dim & -dim
    tile = NUMBERS // size
    rotate_kernel[(-(-rows * (dim // size) // tile),)](
        x, out, signs(dim, x.device), x.stride()[:3], out.stride()[:3], rows, heads, tokens, 1 / math.sqrt(size),
        BACK=back, DIM=dim, SIZE=size, STAGES=size.bit_length() - 1, ROWS=tile, enable_fp_fusion=False, num_warps=4,
    )  # fmt: skip
    return out


def rotate_back(x: torch.Tensor) -> torch.Tensor:
    """The inverse."""
    return rotate(x, back=True)
