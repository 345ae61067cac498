"""Logarithms and inverses of the value scales, computed once per prefill.

The prefill adds a value's log scale to its score, so `exp2` gives the weight times the scale. The inverse takes the
scale out of the row sum again."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.jit.rows import load_row
from qattn_kernels.launch.constants import WIDEST_TILE
from qattn_kernels.ops.prefill.weights import NO_SCALE

REACH = tl.constexpr(WIDEST_TILE)  # slots hold valid numbers up to the next multiple of this after a row's end


class Factors(NamedTuple):
    """Tensors of all rows and heads, with `N` slots each.

    Attributes:
        v_scale, bias: as in `launch.unpacked_kv.UnpackedKV`.
        v_log_scale: fp32 `[B, Hkv, N]`, bias + log2 of the value's scale.
        inverse: fp32 `[B, Hkv, N]`, 1 / scale, 0 where the slot is masked.
        clean: int32 `[B * Hkv]`, the first slot whose bias is not 0.
    """

    v_scale: Any
    bias: Any
    v_log_scale: Any
    inverse: Any
    clean: Any


@triton.jit
def write_factors(F, row, head, N, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Write the `Factors` of one row and head, `STEP` slots at a time, up to the reach of a prefill's last tile."""
    base = head.to(tl.int64) * N
    masked = row.closed * BLOCK + row.length - row.open_start + row.count
    end = tl.cdiv(masked, REACH) * REACH
    for start in range(0, end, STEP):
        n = start + tl.arange(0, STEP)
        b = tl.load(F.bias + base + n, mask=n < end, other=0.0)
        scale = tl.load(F.v_scale + base + n, mask=n < end, other=1.0)
        scale = tl.where((scale == 0.0) | (b != 0.0), NO_SCALE, scale)
        tl.store(F.v_log_scale + base + n, tl.log2(scale) + b, mask=n < end)
        tl.store(F.inverse + base + n, tl.where(b == 0.0, 1.0 / scale, 0.0), mask=n < end)
        masked = tl.minimum(masked, tl.min(tl.where(b == 0.0, end, n)))
    tl.store(F.clean + head, masked)


@triton.jit
def value_factors(FACTORS, rows, heads, N, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Write the `Factors` of one row and KV head per program."""
    head = tl.program_id(0)
    write_factors(Factors(*FACTORS), load_row(rows, head // heads), head, N, BLOCK, STEP)
