"""The rotation in Triton, bit for bit `ops/rotate/reference.py`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _butterflies(x):
    """A stage: `[n, SIZE]` to the sums of neighbours, and behind them their differences."""
    one, other = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return tl.reshape(tl.permute(tl.join(one + other, one - other), (0, 2, 1)), (x.shape[0], x.shape[1]))


@triton.jit
def _turn(X, OUT, x_strides, out_strides, SIGNS, rows, heads, tokens, unit, BACK: tl.constexpr, DIM: tl.constexpr,
          SIZE: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
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
        x = _butterflies(x)
    x *= unit
    if BACK:
        x *= sign
    at = b * out_strides[0] + h * out_strides[1] + t * out_strides[2]
    tl.store(OUT + at[:, None] + d, x.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def rotate_kernel(X, OUT, x_strides, out_strides, SIGNS, rows, heads, tokens, unit, COUNT: tl.constexpr,
                  BACK: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr,
                  ROWS: tl.constexpr):  # fmt: skip
    """Program (tile, tensor): `ROWS` blocks of `SIZE` channels, of `DIM // SIZE` in each token of each head.

    `X`, `OUT` `COUNT` tensors each, their strides three to a tensor; `rows` and `heads` of each; `unit` makes the
    transform orthonormal. `BACK`: the inverse.
    """
    for i in tl.static_range(COUNT):
        if tl.program_id(1) == i:
            if tl.program_id(0) * ROWS < rows[i] * (DIM // SIZE):
                _turn(X[i], OUT[i], x_strides[3 * i : 3 * i + 3], out_strides[3 * i : 3 * i + 3], SIGNS, rows[i],
                      heads[i], tokens, unit, BACK, DIM, SIZE, STAGES, ROWS)  # fmt: skip
