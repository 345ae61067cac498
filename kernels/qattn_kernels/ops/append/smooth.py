"""Smoothed keys for kernels that close blocks. `formats/smoothed/reference.py` is the specification."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.jit.tile_order import unstack


@triton.jit
def dequantize(S, code, scale):
    """Return open tokens in fp32, from an INT8 ring or an unquantized ring."""
    if S.ring.dtype.element_ty == tl.int8:
        return code * scale[:, None]
    else:
        return code


@triton.jit
def mean_key(x, keep, full):
    """Return the mean `[DP]` of the tokens `x` `[BLOCK, DP]` that `keep` `[BLOCK]` selects, summed in the order of the
    reference.

    In a block that is not `full`, the sum is divided by `BLOCK`, as in the reference: empty slots count as zeros."""
    BLOCK: tl.constexpr = x.shape[0]
    STEPS: tl.constexpr = 7 if BLOCK == 128 else 6
    count = tl.where(full, tl.maximum(tl.sum(keep.to(tl.int32), 0), 1), BLOCK).to(tl.float32)
    sums = tl.where(keep[:, None], x, 0.0)
    for _ in tl.static_range(STEPS):
        one, other = unstack(sums)
        sums = one + other
    total = tl.reshape(sums, (x.shape[1],))
    return tl.div_rn(total, tl.zeros_like(total) + count)


@triton.jit
def minus_mean(S, code, scale, keep, k_mean):
    """Return open tokens minus the mean key of their row, zeros outside `keep`."""
    return tl.where(keep[:, None], dequantize(S, code, scale) - k_mean[None, :], 0.0)
