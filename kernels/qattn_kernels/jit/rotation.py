"""The rotation of head dims inside kernels, bit for bit `ops/rotate/reference.py`: no product here is added to, so that
none can be fused into a sum and rounded otherwise, but those with signs. `R` is a `launch.constants.Rotation`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST_ROWS = tl.constexpr(8)  # of a tile that is rotated: as many as there are warps, so that each has whole rows


@triton.jit
def butterflies(x, STAGES: tl.constexpr):
    """Rows of `[n, SIZE]` transformed, not normalized. A stage gives, of the channels that differ in one bit of their
    index, the sum to the one and the difference to the other: the sums of the reference in places of their own, so that
    no number moves but between two threads."""
    for i in tl.static_range(STAGES):
        pairs = tl.reshape(x, (x.shape[0], x.shape[1] >> (i + 1), 2, 1 << i))
        sign = tl.where(tl.arange(0, 2) == 0, 1.0, -1.0)[None, None, :, None]
        both, less = tl.sum(pairs, 2, keep_dims=True), tl.sum(pairs * sign, 2, keep_dims=True)
        x = tl.reshape(tl.where(sign > 0, both, less), (x.shape[0], x.shape[1]))
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
def rotate_rows(x, BACK: tl.constexpr, R: tl.constexpr):
    """fp32 `[n, DP]` rotated, or turned back."""
    sign = _signs(x.shape[1], R)[None, :]
    if not BACK:
        x *= sign
    blocks = tl.reshape(x, (x.shape[0] * (x.shape[1] // R.SIZE), R.SIZE))
    x = tl.reshape(butterflies(blocks, R.STAGES), (x.shape[0], x.shape[1])) * R.UNIT
    return x * sign if BACK else x
