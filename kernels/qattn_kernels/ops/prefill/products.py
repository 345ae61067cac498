"""Products of a prefill tile: queries with keys, and weights with values."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats.fp8.jit import rounded
from qattn_kernels.jit.math import MOST_SUMMED, ROUNDER, ROUNDER_BITS, float_to_int8, to_codes
from qattn_kernels.layout import WIDEST_HEAD

PART = tl.constexpr(WIDEST_HEAD)  # value channels of a product; registers do not hold the sums of more


@triton.jit
def key_order(n, CODES: tl.constexpr):
    """Return the token of column `n` in a tile's scores. For 8-bit weights, bits 1, 2 and 3 of `n` are rotated."""
    return ((n & ~15) | ((n & 6) << 1) | ((n & 8) >> 2) | (n & 1)) if CODES else n


@triton.jit
def token_order(p):
    """Return `p` `[BM, BN]` with its columns in the order of tokens, which undoes `key_order`. On a GPU this only
    renames registers."""
    BM: tl.constexpr = p.shape[0]
    BN: tl.constexpr = p.shape[1]
    return p.reshape(BM, BN // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(BM, BN)


@triton.jit
def load_keys(k, n0, i, C: tl.constexpr):
    """Load keys of slots `n0 + i`: `[DP, BN]`.

    Offsets inside one head fit 31 bits: 4 million slots of 512 channels."""
    d = tl.arange(0, C.DP)
    at = k + n0 * C.D + (i[None, :] * C.D + d[:, None])
    return tl.load(at) if C.D == C.DP else tl.load(at, mask=d[:, None] < C.D, other=0)


@triton.jit
def channels(part: tl.constexpr, C: tl.constexpr):
    """Return the value channels of a part."""
    return tl.arange(0, min(C.DVP, PART)) + part * PART


@triton.jit
def load_values(v, n0, i, N, part: tl.constexpr, C: tl.constexpr):
    """Load one part of the values of slots `n0 + i`: `[BN, channels]`."""
    d = channels(part, C)
    if C.V_INT8 or C.V_FP8:
        at = v + n0 + (d[:, None] * N + i[None, :])
        # channels after the last are summed separately and never stored; the interpreter has no FP8 zero for them
        return tl.trans(tl.load(at) if C.DV == C.DVP else tl.load(at, mask=d[:, None] < C.DV))
    else:
        at = v + n0 * C.DV + (i[:, None] * C.DV + d[None, :])
        return tl.load(at) if C.DV == C.DVP else tl.load(at, mask=d[None, :] < C.DV, other=0)


@triton.jit
def product(x, y, C: tl.constexpr):
    """Multiply in the dtype of `x` with fp32 sums. The interpreter has no bf16 product, so it multiplies in fp32."""
    if C.PLAIN:
        return tl.dot(x.to(tl.float32), y.to(tl.float32))
    return tl.dot(x, y.to(x.dtype), input_precision="ieee")


@triton.jit
def products(x, y):
    """Multiply INT8 and return fp32 `ROUNDER + sum`."""
    if x.shape[1] > MOST_SUMMED:
        return tl.dot(x, y, out_dtype=tl.int32).to(tl.float32) + ROUNDER
    else:
        start = tl.full([x.shape[0], y.shape[1]], ROUNDER_BITS, tl.int32)
        return tl.dot(x, y, acc=start, out_dtype=tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def add_values(acc, p, values, alpha, fade, C: tl.constexpr):
    """Return `acc * alpha` plus the values `[BN, channels]` weighted by `p` `[BM, BN]`.

    `fade`: `[BM]`, log2 of the unit of INT8 weights."""
    if C.V_INT8:
        beta = tl.exp2(fade)
        sums = products(token_order(to_codes(p) if C.RAISED and C.BY_ROW else float_to_int8(p)), values)
        return sums * beta[:, None] + (acc * alpha[:, None] - (beta * ROUNDER)[:, None])
    elif C.V_FP8:  # accumulate from zero and add outside: FP8 tensor cores sum in fewer bits than an accumulator has
        if C.PLAIN:
            sums = tl.dot(token_order(rounded(p)), values.to(tl.float32))
        else:
            sums = tl.dot(token_order(p.to(tl.float8e4nv)), values, max_num_imprecise_acc=p.shape[1])
        return acc * alpha[:, None] + sums
    else:
        return acc * alpha[:, None] + product(p.to(values.dtype), values, C)
