"""Mean key that smoothing subtracts, in Triton. `formats/smoothed/reference.py` is the specification."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.jit.rows import slot_bits
from qattn_kernels.jit.tokens import Source, new_tokens, row_before, with_ring
from qattn_kernels.layout import BlockState
from qattn_kernels.ops.append.smooth import dequantize, mean_key


@triton.jit(do_not_specialize=["span_stride", "NB"])
def mean_kernel(SOURCE, SPANS, span_stride, LAYER, CALL_MEAN, NB, K_QUANTIZE: tl.constexpr, C: tl.constexpr):
    """Compute the mean key that a long call subtracts from its keys. Runs before the call, one program per (head, row).

    `CALL_MEAN` fp32 `[B, H, D]` receives the mean. A row that has a packed block uses its stored mean,
    `k_mean` of `LAYER`. A row whose first block closes in this call computes the mean of that block and stores it
    there. Any other row uses the mean of its unfinished first block."""
    h, b = tl.program_id(0), tl.program_id(1)
    row = row_before(LAYER, SPANS, span_stride, b, NB, C)
    SIDE: tl.constexpr = C.K
    d, bh = tl.arange(0, SIDE.DP), b * C.H + h
    if row.closed > 0:
        mean = tl.load(LAYER.k_mean + bh * SIDE.D + d, mask=d < SIDE.D, other=0.0)
    else:
        t = tl.arange(0, C.BLOCK)
        pos = row.open_start + t
        old = pos < row.length
        new = (~old) & (pos < row.length + row.count)
        k, _, bad = new_tokens(Source(*SOURCE), b, h, pos - row.length, new, row.first, C)
        code, scale = K_QUANTIZE(k)
        code, scale = with_ring(LAYER.k, code, scale, pos, old, bh, SIDE, C)
        flags = BlockState(*LAYER.blocks).dropped + bh.to(tl.int64) * NB * (C.BLOCK // 8)
        keep = (old | new) & (~bad) & ~(old & (slot_bits(flags, t) == 1))
        mean = mean_key(dequantize(LAYER.k, code, scale), keep, row.closing > 0)
        if row.closing > 0:
            tl.store(LAYER.k_mean + bh * SIDE.D + d, mean, mask=d < SIDE.D)
    tl.store(CALL_MEAN + bh * SIDE.D + d, mean, mask=d < SIDE.D)
