"""What kernels that close blocks need of smoothed keys; `formats/smoothed/reference.py` is the specification."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.jit.tile_order import unstack


@triton.jit
def dequantize(S, code, scale):
    """The numbers of open tokens, whatever their ring holds."""
    if S.ring.dtype.element_ty == tl.int8:
        return code * scale[:, None]
    else:
        return code


@triton.jit
def mean_key(x, keep, full):
    """The mean of tokens `x` `[BLOCK, DP]`, added in the order of the reference; of a block that is not `full` empty
    slots count as zeros, as there."""
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
    """Open tokens without the mean key of their row, zeros outside `keep`."""
    return tl.where(keep[:, None], dequantize(S, code, scale) - k_mean[None, :], 0.0)
