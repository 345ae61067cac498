"""The rotation in Triton, bit for bit `rotate/reference.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def butterflies(x):
    """A stage: `[n, SIZE]` to the sums of neighbours, and behind them their differences."""
    one, other = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return tl.reshape(tl.permute(tl.join(one + other, one - other), (0, 2, 1)), (x.shape[0], x.shape[1]))


@triton.jit
def rotate_kernel(X, OUT, SIGNS, x_strides, out_strides, rows, heads, tokens, unit, BACK: tl.constexpr,
                  DIM: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Program: `ROWS` blocks of `SIZE` channels, of `DIM // SIZE` in each of `rows` tokens of all heads. `unit` makes
    the transform orthonormal. `BACK`: the inverse."""
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, block = n // (DIM // SIZE), n % (DIM // SIZE)
    b, h, t = row // (heads * tokens), row // tokens % heads, row % tokens
    d = (block * SIZE)[:, None] + tl.arange(0, SIZE)[None, :]
    inside = (row < rows)[:, None]
    at = b * x_strides[0] + h * x_strides[1] + t * x_strides[2]
    x = tl.load(X + at[:, None] + d, mask=inside, other=0.0).to(tl.float32)
    sign = tl.load(SIGNS + d)
    if not BACK:
        x *= sign
    for _ in tl.static_range(STAGES):
        x = butterflies(x)
    x *= unit
    if BACK:
        x *= sign
    at = b * out_strides[0] + h * out_strides[1] + t * out_strides[2]
    tl.store(OUT + at[:, None] + d, x.to(OUT.dtype.element_ty), mask=inside)
