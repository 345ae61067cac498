"""Rotation of head dimensions in kernels, bit for bit as `ops/rotate/reference.py`.

Sums here take no products except with signs, so the compiler cannot fuse and round differently. Launch a kernel that
multiplies by factors with `enable_fp_fusion=False`. `R` is a `launch.constants.Rotation`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def butterflies(x, STAGES: tl.constexpr):
    """Transform the rows of `[n, SIZE]` without normalization. Each stage yields sums of neighbours, then their
    differences."""
    for _ in tl.static_range(STAGES):
        one, other = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(one + other, one - other), (0, 2, 1)), (x.shape[0], x.shape[1]))
    return x


@triton.jit
def _signs(DP: tl.constexpr, R: tl.constexpr):
    """Return 1 or -1 for each channel, `[DP]`, from constants, to avoid waiting for a load."""
    d = tl.arange(0, DP)
    bits = tl.zeros([DP], tl.int32)
    for i in tl.static_range(DP // 16):
        bits = tl.where(d // 16 == i, (R.SIGNS >> (16 * i)) & 0xFFFF, bits)
    return tl.where(((bits >> (d % 16)) & 1) == 1, -1.0, 1.0)


@triton.jit
def factors_of(FACTORS, h, SIDE: tl.constexpr):
    """Return the factors fp32 `[DP]` that equalize the key channels of KV head `h`, from `FACTORS` `[H, D]`."""
    d = tl.arange(0, SIDE.DP)
    return tl.load(FACTORS + h * SIDE.D + d, mask=d < SIDE.D, other=0.0)


@triton.jit
def rotate_rows(x, factor, BACK: tl.constexpr, R: tl.constexpr):
    """Rotate fp32 `[n, DP]`, or with `BACK` rotate back. `factor`: `[DP]` factors of equalized channels, or None."""
    sign = _signs(x.shape[1], R)[None, :]
    if factor is not None:
        sign *= factor[None, :]
    if not BACK:
        x *= sign
    blocks = tl.reshape(x, (x.shape[0] * (x.shape[1] // R.SIZE), R.SIZE))
    x = tl.reshape(butterflies(blocks, R.STAGES), (x.shape[0], x.shape[1])) * R.UNIT
    return x * sign if BACK else x
