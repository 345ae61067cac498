"""The rotation of head dims inside kernels, bit for bit `ops/rotate/reference.py`: no product here is added to, so that
none can be fused into a sum and rounded otherwise, but those with signs; a kernel that multiplies by factors is
launched with `enable_fp_fusion=False`. `R` is a `launch.constants.Rotation`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def butterflies(x, STAGES: tl.constexpr):
    """Rows of `[n, SIZE]` transformed, not normalized; a stage gives the sums of neighbours, and behind them their
    differences."""
    for _ in tl.static_range(STAGES):
        one, other = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(one + other, one - other), (0, 2, 1)), (x.shape[0], x.shape[1]))
    return x


@triton.jit
def _signs(DP: tl.constexpr, R: tl.constexpr):
    """1 or -1 for each channel, `[DP]`: constants, since a load would be waited for."""
    d = tl.arange(0, DP)
    bits = tl.zeros([DP], tl.int32)
    for i in tl.static_range(DP // 16):
        bits = tl.where(d // 16 == i, (R.SIGNS >> (16 * i)) & 0xFFFF, bits)
    return tl.where(((bits >> (d % 16)) & 1) == 1, -1.0, 1.0)


@triton.jit
def factors_of(FACTORS, h, SIDE: tl.constexpr):
    """fp32 `[DP]`: what the channels of KV head `h` are multiplied by where keys are equalized; of `[H, D]`."""
    d = tl.arange(0, SIDE.DP)
    return tl.load(FACTORS + h * SIDE.D + d, mask=d < SIDE.D, other=0.0)


@triton.jit
def rotate_rows(x, factor, BACK: tl.constexpr, R: tl.constexpr):
    """fp32 `[n, DP]` rotated, or turned back. `factor`: `[DP]`, of equalized channels, or None."""
    sign = _signs(x.shape[1], R)[None, :]
    if factor is not None:
        sign *= factor[None, :]
    if not BACK:
        x *= sign
    blocks = tl.reshape(x, (x.shape[0] * (x.shape[1] // R.SIZE), R.SIZE))
    x = tl.reshape(butterflies(blocks, R.STAGES), (x.shape[0], x.shape[1])) * R.UNIT
    return x * sign if BACK else x
