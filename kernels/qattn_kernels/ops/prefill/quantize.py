"""Quantize unpacked keys and values to INT8 or FP8, in Triton. `reference/operands.py` is the specification."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.fp8.jit import rounded
from qattn_kernels.formats.int_group.jit import shared
from qattn_kernels.jit.math import SMALLEST_NORMAL, broken, float_to_int8, short_scale
from qattn_kernels.jit.rows import load_row
from qattn_kernels.ops.prefill.value_factors import REACH

TILE = tl.constexpr(64)
FIELDS = tl.constexpr(4)  # rows per program in the output of `stats_kernel`
FAR = tl.constexpr(1073741824.0)  # greater than any slot


@triton.jit
def _end(rows, b, BLOCK: tl.constexpr):
    """Return the end of the slots in use in a row, rounded up to whole blocks."""
    row = load_row(rows, b)
    return (row.closed * BLOCK + row.length - row.open_start + row.count + BLOCK - 1) // BLOCK * BLOCK


@triton.jit
def _of_head(X, strides, head, heads, n):
    """Return pointers `[n, 1]` to tokens `n` of one head in `X` `[B, H, <= N, D]`; the last stride must be 1.

    Kernels read only visible slots, so `X` can be a cache's own tensor with fewer slots than the unpacked keys and
    values."""
    first = X + (head // heads).to(tl.int64) * strides[0] + (head % heads).to(tl.int64) * strides[1]
    return first + n.to(tl.int64)[:, None] * strides[2]


@triton.jit
def _gather(SOURCE, BIAS, OUT, head, heads, first, end, N, MEAN: tl.constexpr, RANGE: tl.constexpr, D: tl.constexpr,
            DP: tl.constexpr):  # fmt: skip
    """Store the statistics of slots `first` to `end`, see `stats_kernel`. Skips unrequested ones to save registers.

    `SOURCE`: keys or values, and their strides over rows, heads and slots."""
    X, strides = SOURCE
    d = tl.arange(0, DP)
    # reduce once at the end: reductions between warps are expensive
    sums, high = tl.full([TILE, DP], 0.0, tl.float32), tl.full([TILE, DP], float("-inf"), tl.float32)
    low, count = tl.full([TILE, DP], float("inf"), tl.float32), tl.full([TILE], 0.0, tl.float32)
    clean = tl.full([TILE], FAR, tl.float32)
    for start in range(first, end, TILE):
        n = start + tl.arange(0, TILE)
        visible = tl.load(BIAS + head.to(tl.int64) * N + n, mask=n < end, other=float("-inf")) == 0.0
        there = visible[:, None] & (d < D)[None, :]
        x = tl.load(_of_head(X, strides, head, heads, n) + d[None, :], mask=there, other=0.0).to(tl.float32)
        if MEAN:
            sums += x
        if RANGE and MEAN:
            high = tl.maximum(high, tl.where(visible[:, None], x, float("-inf")))
            low = tl.minimum(low, tl.where(visible[:, None], x, float("inf")))
        elif RANGE:
            high = tl.maximum(high, tl.abs(x))
        count += visible.to(tl.float32)
        clean = tl.minimum(clean, tl.where(visible, FAR, n.to(tl.float32)))
    if MEAN:
        tl.store(OUT + d, tl.sum(sums, 0), mask=d < D)
    if RANGE:
        top = tl.max(high, 0)
        tl.store(OUT + D + d, top, mask=d < D)
        tl.store(OUT + 2 * D + d, tl.min(low, 0) if MEAN else -top, mask=d < D)
    tl.store(OUT + 3 * D + d, tl.where(d == 0, tl.sum(count, 0), tl.min(clean, 0)), mask=d < D)


@triton.jit
def stats_kernel(K, V, BIAS, ROWS, OUT, heads, N, D: tl.constexpr, DP: tl.constexpr, STEP: tl.constexpr,
                 BLOCK: tl.constexpr, SMOOTH_V: tl.constexpr):  # fmt: skip
    """Compute channel statistics of `STEP` slots. One program per (part of the slots, row and head, keys or values).

    `K`, `V`: a tensor and its strides over rows, heads and slots.

    Writes fp32 `OUT` `[sides, B * H, parts, FIELDS, D]`: sum, largest and smallest value of each channel. The fourth
    field holds the count of visible tokens in channel 0, and the first masked slot in the other channels. Keys get only
    the sum. Values get the sum if they are smoothed; otherwise their range is symmetric around 0."""
    part, head, side = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end = tl.minimum(_end(ROWS, head // heads, BLOCK), (part + 1) * STEP)
    own = OUT + ((side * tl.num_programs(1) + head) * tl.num_programs(0) + part).to(tl.int64) * (FIELDS * D)
    if side == 0:
        _gather(K, BIAS, own, head, heads, part * STEP, end, N, True, False, D, DP)
    else:
        _gather(V, BIAS, own, head, heads, part * STEP, end, N, SMOOTH_V, True, D, DP)


@triton.jit(do_not_specialize=["parts"])
def settle_kernel(STATS, MEAN, SCALE, CLEAN, parts, largest, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
                  SMOOTH_K: tl.constexpr, SMOOTH_V: tl.constexpr):  # fmt: skip
    """Combine the parts of `stats_kernel`. One program per (row and head, keys or values).

    Writes `MEAN` fp32 `[sides, B * H, D]`, zeros unless smoothed, and `SCALE` of the same shape: each value channel's
    scale around its mean, such that the largest magnitude maps to `largest`. `CLEAN` int32 `[B * H]` gets the first
    masked slot."""
    side, d = tl.program_id(1), tl.arange(0, DP)
    head = side * tl.num_programs(0) + tl.program_id(0)
    of_values = tl.full([CHUNK, DP], side, tl.int32) == 1
    smooth = tl.where(of_values, SMOOTH_V, SMOOTH_K) == 1
    sums, count, clean = tl.full([DP], 0.0, tl.float32), 0.0, FAR + 0.0
    high, low = tl.full([DP], float("-inf"), tl.float32), tl.full([DP], float("inf"), tl.float32)
    for start in range(0, parts, CHUNK):
        i = start + tl.arange(0, CHUNK)
        own = STATS + (head * parts + i).to(tl.int64) * (FIELDS * D)
        at, there = own[:, None] + d[None, :], (i < parts)[:, None] & (d < D)[None, :]
        ranged = there & of_values
        sums += tl.sum(tl.load(at, mask=there & smooth, other=0.0), 0)
        high = tl.maximum(high, tl.max(tl.load(at + D, mask=ranged, other=float("-inf")), 0))
        low = tl.minimum(low, tl.min(tl.load(at + 2 * D, mask=ranged, other=float("inf")), 0))
        count += tl.sum(tl.load(own + 3 * D, mask=i < parts, other=0.0), 0)
        clean = tl.minimum(clean, tl.min(tl.load(own + 3 * D + 1, mask=i < parts, other=FAR), 0))
    mean = sums / tl.maximum(count, 1.0)
    top = tl.where(count > 0, tl.maximum(high - mean, mean - low), 0.0)
    tl.store(MEAN + head * D + d, mean, mask=d < D)
    tl.store(CLEAN + tl.program_id(0), clean.to(tl.int32))  # keys and values give the same
    tl.store(SCALE + head * D + d, tl.where(top < largest * SMALLEST_NORMAL, 0.0, top / largest), mask=d < D)


@triton.jit
def _load_tile(X, strides, BIAS, MEAN, head, heads, n, N, SMOOTH: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Load tokens `n` of a head, fp32 `[TILE, DP]`, minus `MEAN` if smoothed; zeros where the slot is masked."""
    d = tl.arange(0, DP)
    visible = (tl.load(BIAS + head.to(tl.int64) * N + n) == 0.0)[:, None]
    x = _of_head(X, strides, head, heads, n) + d[None, :]
    x = tl.load(x, mask=visible & (d < D)[None, :], other=0.0).to(tl.float32)
    if SMOOTH:
        mean = tl.load(MEAN + head * D + d, mask=d < D, other=0.0)
        x = tl.where(visible, x - mean[None, :], 0.0)
    return x


class CodeSizes(NamedTuple):
    """Constants of `codes_kernel`.

    Attributes:
        LEVELS: largest code of a key.
        GROUP: which keys share a scale (`formats.granularity`).
        SMOOTH_K, SMOOTH_V: subtract the mean from keys, from FP8 values.
        FP8: values become FP8, otherwise INT8.
        D, DP: head dim, and the next power of two.
        BLOCK: slots per block.
    """

    LEVELS: int
    GROUP: str
    SMOOTH_K: bool
    SMOOTH_V: bool
    FP8: bool
    D: int
    DP: int
    BLOCK: int


@triton.jit
def _write_keys(KEYS, BIAS, head, heads, n, N, C: tl.constexpr):
    """Write codes and scales of keys in slots `n` `[TILE]`. `KEYS` as for `codes_kernel`."""
    D: tl.constexpr = C.D
    GROUP: tl.constexpr = C.GROUP  # a string, which Triton 3.6 takes only by a name
    K, strides, MEAN, CODES, SCALES = KEYS
    at, d = head.to(tl.int64) * N + n, tl.arange(0, C.DP)
    x = _load_tile(K, strides, BIAS, MEAN, head, heads, n, N, C.SMOOTH_K, D, C.DP)
    scale = shared(tl.max(tl.abs(x), 1), GROUP) * (1.0 / C.LEVELS)
    scale = short_scale(tl.where(scale < SMALLEST_NORMAL, 0.0, scale))
    code = tl.clamp(x * (1.0 / tl.where(scale == 0.0, 1.0, scale))[:, None], -1.0 * C.LEVELS, 1.0 * C.LEVELS)
    tl.store(CODES + at[:, None] * D + d[None, :], float_to_int8(code), mask=(d < D)[None, :])
    tl.store(SCALES + at, scale)


@triton.jit
def _write_values(VALUES, BIAS, head, heads, n, N, C: tl.constexpr):
    """Write codes of values in slots `n` `[TILE]`, and scales of INT8 codes. `VALUES` as for `codes_kernel`."""
    D: tl.constexpr = C.D
    V, strides, MEAN, CHANNEL, CODES, SCALES = VALUES
    d = tl.arange(0, C.DP)
    x = _load_tile(V, strides, BIAS, MEAN, head, heads, n, N, C.FP8 and C.SMOOTH_V, D, C.DP)
    where = CODES + head.to(tl.int64) * D * N + d[:, None].to(tl.int64) * N + n[None, :]
    if C.FP8:
        scale = tl.load(CHANNEL + head * D + d, mask=d < D, other=0.0)
        x = tl.clamp(x * (1.0 / tl.where(scale == 0.0, 1.0, scale))[None, :], -448.0, 448.0)
        byte = rounded(x).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(where, tl.trans(byte), mask=(d < D)[:, None])
    else:
        scale = tl.max(tl.abs(x), 1) * (1.0 / 127.0)
        scale = tl.where(scale < SMALLEST_NORMAL, 0.0, scale)
        code = float_to_int8(x * (1.0 / tl.where(scale == 0.0, 1.0, scale))[:, None])
        tl.store(where, tl.trans(code), mask=(d < D)[:, None])
        tl.store(SCALES + head.to(tl.int64) * N + n, scale)


@triton.jit
def codes_kernel(KEYS, VALUES, BIAS, ROWS, heads, N, C: tl.constexpr):
    """Quantize a tile of slots. One program per (tile of slots, row and head, keys or values).

    A side that is already quantized is None. `C`: the `CodeSizes`.

    Args:
        KEYS: `(tensor, strides, mean, codes, scales)`. Writes INT8 codes `[B, H, N, D]` around the mean, and scales
            `[B, H, N]`.
        VALUES: `(tensor, strides, mean, channel scales, codes, scales)`. Writes codes `[B, H, D, N]`: FP8 bytes scaled
            per channel around the mean, or INT8 with scales `[B, H, N]`.
    """
    head, side = tl.program_id(1), tl.program_id(2)
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if tl.program_id(0) * TILE < tl.cdiv(_end(ROWS, head // heads, C.BLOCK), REACH) * REACH:
        if KEYS is not None:
            if side == 0:
                _write_keys(KEYS, BIAS, head, heads, n, N, C)
        if VALUES is not None:
            if side == tl.num_programs(2) - 1:
                _write_values(VALUES, BIAS, head, heads, n, N, C)


@triton.jit
def query_means_kernel(Q, strides, ROWS, OUT, heads, D: tl.constexpr, DP: tl.constexpr, SIZE: tl.constexpr,
                       TOGETHER: tl.constexpr):  # fmt: skip
    """Compute fp32 means `[B, Hq, n, D]` of each `SIZE` real queries `[B, Hq, T, D]`.

    One program per (row and head, n). With `TOGETHER`, writes instead each group's contribution to the mean of all
    queries. Non-finite queries count as zeros. Models store queries token by token, so neighbouring heads run at once
    to spread over the memory channels."""
    head, part = tl.program_id(0), tl.program_id(1)
    row = load_row(ROWS, head // heads)
    d = tl.arange(0, DP)
    begin = part * SIZE
    end = tl.minimum(begin + SIZE, row.count)
    sums = tl.full([TILE, DP], 0.0, tl.float32)
    for start in range(begin, end, TILE):
        t = start + tl.arange(0, TILE)
        there = (t < end)[:, None] & (d < D)[None, :]
        x = tl.load(_of_head(Q, strides, head, heads, row.first + t) + d[None, :], mask=there, other=0.0).to(tl.float32)
        sums += tl.where(broken(x, 1)[:, None], 0.0, x)
    count = row.count if TOGETHER else end - begin
    mean = tl.sum(sums, 0) / tl.maximum(count, 1).to(tl.float32)
    tl.store(OUT + (head.to(tl.int64) * tl.num_programs(1) + part) * D + d, mean, mask=d < D)
