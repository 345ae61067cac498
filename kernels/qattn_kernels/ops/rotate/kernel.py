"""The rotation in Triton, for whole tensors or inside the kernels of a short call.

Its results equal `reference.py` bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.jit.rotation import butterflies, factors_of, rotate_rows


class Turn(NamedTuple):
    """One tensor that a launch rotates.

    Attributes:
        x, out: input and output.
        x_strides, out_strides: their strides over rows, heads and tokens.
        factors: fp32 `[heads / group, DIM]` that multiply the channels before the rotation, or None.
        group: heads that share factors.
        rows: tokens of all heads.
        heads: heads of the tensor.
    """

    x: Any
    out: Any
    x_strides: Any
    out_strides: Any
    factors: Any
    group: Any
    rows: Any
    heads: Any


@triton.jit
def _turn(turn, SIGNS, tokens, unit, BACK: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr,
          ROWS: tl.constexpr):  # fmt: skip
    """Rotate this program's `ROWS` blocks of channels of one `Turn`. Arguments as for `rotate_kernel`."""
    X, OUT, x_strides, out_strides, FACTORS, group, rows, heads = turn
    n = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, block = n // (DIM // SIZE), n % (DIM // SIZE)
    b, h, t = row // (heads * tokens), row // tokens % heads, row % tokens
    d = (block * SIZE)[:, None] + tl.arange(0, SIZE)[None, :]
    inside = (row < rows)[:, None]
    at = b * x_strides[0] + h * x_strides[1] + t * x_strides[2]
    x = tl.load(X + at[:, None] + d, mask=inside, other=0.0).to(tl.float32)
    sign = tl.load(SIGNS + d)
    if FACTORS is not None:
        sign *= tl.load(FACTORS + (h // group)[:, None] * DIM + d)
    if not BACK:
        x *= sign
    x = butterflies(x, STAGES) * unit
    if BACK:
        x *= sign
    at = b * out_strides[0] + h * out_strides[1] + t * out_strides[2]
    tl.store(OUT + at[:, None] + d, x.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def rotate_kernel(TURNS, SIGNS, tokens, unit, COUNT: tl.constexpr, BACK: tl.constexpr, DIM: tl.constexpr,
                  SIZE: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Rotate `ROWS` blocks of `SIZE` channels. One program per (tile, tensor).

    Each token of a head has `DIM // SIZE` blocks of channels, which are rotated separately.

    Args:
        TURNS: a `Turn` for each of `COUNT` tensors.
        SIGNS: fp32 `[DIM]`, the random signs of the channels.
        tokens: tokens of each tensor. unit: factor that makes the transform orthonormal.
        BACK: compute the inverse. STAGES: log2 of `SIZE`.
    """
    for i in tl.static_range(COUNT):
        if tl.program_id(1) == i:
            if tl.program_id(0) * ROWS < TURNS[i].rows * (DIM // SIZE):
                _turn(TURNS[i], SIGNS, tokens, unit, BACK, DIM, SIZE, STAGES, ROWS)


@triton.jit
def _offsets(strides, b, head, t):
    """Return int64 offsets of tokens `t` of heads `head` in row `b`."""
    return b.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + t.to(tl.int64) * strides[2]


@triton.jit
def rotate_queries(QUERIES, b, h, T, C: tl.constexpr):
    """Rotate the queries of `T` tokens of KV head `h` in a short call, and round them to the model's dtype.

    `QUERIES`: input and output `[B, Hq, T, D]`, the strides of both over rows, heads and tokens, and the queries'
    factors fp32 `[H, D]` if keys are equalized, else None."""
    SIDE: tl.constexpr = C.K
    R: tl.constexpr = SIDE.ROTATION
    d = tl.arange(0, SIDE.DP)
    factor = None
    if SIDE.EQUALIZED:
        factor = factors_of(QUERIES[4], h, SIDE)
    for tile in range(tl.cdiv(T * C.G, C.Q)):
        n = tile * C.Q + tl.arange(0, C.Q)
        inside = (n < T * C.G)[:, None] & (d < SIDE.D)[None, :]
        at = _offsets(QUERIES[2], b, h * C.G + n % C.G, n // C.G)
        q = tl.load(QUERIES[0] + at[:, None] + d[None, :], mask=inside, other=0.0)
        q = rotate_rows(q.to(tl.float32), factor, False, R).to(q.dtype)
        at = _offsets(QUERIES[3], b, h * C.G + n % C.G, n // C.G)
        tl.store(QUERIES[1] + at[:, None] + d[None, :], q, mask=inside)
