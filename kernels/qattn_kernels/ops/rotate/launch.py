"""The rotation: a launch of its own before a long call, inside the kernels of a short one."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from qattn_kernels.launch.call import Call
from qattn_kernels.launch.constants import Rotation
from qattn_kernels.launch.launches import constant, launch
from qattn_kernels.layer.spec import Compute
from qattn_kernels.ops.rotate.kernel import rotate_kernel
from qattn_kernels.ops.rotate.reference import signs

NUMBERS = 2048  # of one program


@lru_cache(maxsize=64)
def rotation_of(dim: int) -> Rotation:
    """The rotation of so many channels."""
    size = dim & -dim
    bits = sum(1 << d for d, sign in enumerate(signs(dim, torch.device("cpu")).tolist()) if sign < 0)
    return Rotation(bits, size, size.bit_length() - 1, 1 / math.sqrt(size))


def rotate(
    tensors: list[torch.Tensor], factors: list[torch.Tensor | None] | None = None, back: bool = False
) -> list[torch.Tensor]:
    """Each `[B, H, T, D]`, of one B, T and D, rotated or turned back in its own dtype and order of memory, in one
    launch. `factors`: fp32 `[Hkv, D]` or None for each, as `ops.rotate.reference.rotate` takes them."""
    if not tensors:
        return []
    given = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    out = [torch.empty_like(x) for x in given]
    heads = tuple(x.shape[1] for x in given)
    batch, _, tokens, dim = given[0].shape
    rows, rotation = tuple(batch * h * tokens for h in heads), rotation_of(dim)
    tile, scaled = NUMBERS // rotation.SIZE, tuple(factors or [None] * len(given))
    groups = tuple(1 if by is None else h // len(by) for h, by in zip(heads, scaled, strict=True))
    launch(
        rotate_kernel, (-(-max(rows) * (dim // rotation.SIZE) // tile), len(given)),
        tuple(given), tuple(out), *(tuple(s for x in part for s in x.stride()[:3]) for part in (given, out)),
        constant(signs, dim, given[0].device), scaled, groups, rows, heads, tokens, rotation.UNIT,
        COUNT=len(given), BACK=back, DIM=dim, SIZE=rotation.SIZE, STAGES=rotation.STAGES, ROWS=tile,
        enable_fp_fusion=False, num_warps=4,
    )  # fmt: skip
    return out


def rotated_back(out: torch.Tensor, compute: Compute) -> torch.Tensor:
    """The output of a long call: turned back where its values were rotated."""
    return out if compute.rotate_v == "none" else rotate([out], back=True)[0]


def inside(call: Call) -> Call:
    """A short call whose kernels rotate what they load, in place of `rotate` before and after: new keys and values
    wherever they are read, queries in the append, the output in the merge."""
    compute, size = call.spec.compute, call.sizes
    k = rotation_of(size.K.D) if compute.rotate == "hadamard" else None
    v = rotation_of(size.V.D) if compute.rotate_v == "hadamard" else None
    size = size._replace(K=size.K._replace(ROTATION=k, EQUALIZED=compute.equalize), V=size.V._replace(ROTATION=v))
    return call._replace(sizes=size, turned=call.query if k is None else torch.empty_like(call.query))
