"""Rotate tensors in a separate launch for a long call, or inside the kernels of a short call."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from qattn_kernels.launch.call import Call
from qattn_kernels.launch.constants import Rotation
from qattn_kernels.launch.launches import constant, launch
from qattn_kernels.layer.spec import Compute
from qattn_kernels.ops.rotate.kernel import Turn, rotate_kernel
from qattn_kernels.ops.rotate.reference import signs

NUMBERS = 2048  # values that one program rotates


@lru_cache(maxsize=64)
def rotation_of(dim: int) -> Rotation:
    """Return the rotation of `dim` channels."""
    size = dim & -dim
    bits = sum(1 << d for d, sign in enumerate(signs(dim, torch.device("cpu")).tolist()) if sign < 0)
    return Rotation(bits, size, size.bit_length() - 1, 1 / math.sqrt(size))


def rotate(
    tensors: list[torch.Tensor], factors: list[torch.Tensor | None] | None = None, back: bool = False
) -> list[torch.Tensor]:
    """Rotate tensors `[B, H, T, D]` in one launch. B, T and D are the same for all; dtypes and memory orders stay.

    Args:
        factors: for each tensor fp32 `[Hkv, D]` or None, as for `ops.rotate.reference.rotate`.
        back: whether to compute the inverse.
    """
    if not tensors:
        return []
    given = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    out = [torch.empty_like(x) for x in given]
    _, _, tokens, dim = given[0].shape
    turns = tuple(_turn(*one) for one in zip(given, out, factors or [None] * len(given), strict=True))
    rotation = rotation_of(dim)
    tile = NUMBERS // rotation.SIZE
    launch(
        rotate_kernel, (-(-max(turn.rows for turn in turns) * (dim // rotation.SIZE) // tile), len(given)),
        turns, constant(signs, dim, given[0].device), tokens, rotation.UNIT,
        COUNT=len(turns), BACK=back, DIM=dim, SIZE=rotation.SIZE, STAGES=rotation.STAGES, ROWS=tile,
        enable_fp_fusion=False, num_warps=4,
    )  # fmt: skip
    return out


def _turn(x: torch.Tensor, out: torch.Tensor, factors: torch.Tensor | None) -> Turn:
    batch, heads, tokens, _ = x.shape
    group = 1 if factors is None else heads // len(factors)
    return Turn(x, out, x.stride()[:3], out.stride()[:3], factors, group, batch * heads * tokens, heads)


def rotated_back(out: torch.Tensor, compute: Compute) -> torch.Tensor:
    """Return the output of a long call, rotated back if its values were rotated."""
    return out if compute.rotate_v == "none" else rotate([out], back=True)[0]


def inside(call: Call) -> Call:
    """Return a short call whose kernels do the rotation, without separate launches of `rotate`.

    Kernels rotate new keys and values when they load them, the append rotates the queries, and the merge rotates the
    output back.
    """
    compute, size = call.spec.compute, call.sizes
    k = rotation_of(size.K.D) if compute.rotate == "hadamard" else None
    v = rotation_of(size.V.D) if compute.rotate_v == "hadamard" else None
    size = size._replace(K=size.K._replace(ROTATION=k, EQUALIZED=compute.equalize), V=size.V._replace(ROTATION=v))
    return call._replace(sizes=size, turned=call.query if k is None else torch.empty_like(call.query))
