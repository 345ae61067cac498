"""New tokens and ring tokens in kernels, and the `Row` of a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.jit.math import broken
from qattn_kernels.jit.rotation import factors_of, rotate_rows
from qattn_kernels.layout import Row, RowState


class Source(NamedTuple):
    """New keys and values of a call, `[B, H, T, D]`, and their strides over rows, heads and columns.

    If a kernel equalizes keys, `key` is a tuple of keys and factors, fp32 `[H, D]`.

    The functions below take new tokens by number: token `fresh` of a row is in column `first + fresh`, because padding
    comes before it. `new` marks the numbers that are tokens of the row."""

    key: Any
    value: Any
    k_strides: Any
    v_strides: Any


@triton.jit
def load_new(X, strides, b, h, fresh, new, first, SIDE: tl.constexpr):
    """Load new tokens `fresh` `[n]`: `[n, DP]` in the model's dtype, zeros where `new` is false. `X`: keys or values of
    a `Source`."""
    where = X
    if SIDE.EQUALIZED:
        where = X[0]
    d = tl.arange(0, SIDE.DP)
    column = tl.where(new, first + fresh, 0).to(tl.int64)
    at = b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1] + column * strides[2]
    return tl.load(where + at[:, None] + d[None, :], mask=new[:, None] & (d < SIDE.D)[None, :], other=0.0)


@triton.jit
def _rotated(x, X, h, SIDE: tl.constexpr):
    """Return the output of `load_new` on `X` in fp32, rotated if kernels rotate, and rounded to the model's dtype."""
    if SIDE.ROTATION is not None:
        R: tl.constexpr = SIDE.ROTATION
        factor = None
        if SIDE.EQUALIZED:
            factor = factors_of(X[1], h, SIDE)
        x = rotate_rows(x.to(tl.float32), factor, False, R).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def new_tokens(source, b, h, fresh, new, first, C: tl.constexpr):
    """Return new keys and values, fp32 `[n, DP]`, with zeros for tokens whose key or value is not finite, and bool
    `[n]`: which tokens these are."""
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    k = load_new(source.key, source.k_strides, b, h, fresh, new, first, K_SIDE)
    v = load_new(source.value, source.v_strides, b, h, fresh, new, first, V_SIDE)
    return checked_tokens(k, v, source, h, new, C)


@triton.jit
def checked_tokens(k, v, source, h, new, C: tl.constexpr):
    """Return the result of `new_tokens` from keys and values that `load_new` read for head `h`."""
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    k, v = _rotated(k, source.key, h, K_SIDE), _rotated(v, source.value, h, V_SIDE)
    bad = new & (broken(k, 1) | broken(v, 1))
    return tl.where(bad[:, None], 0.0, k), tl.where(bad[:, None], 0.0, v), bad


@triton.jit
def _tokens_of(source, b, h, fresh, new, first, SIDE: tl.constexpr):
    """Return new tokens of one side in fp32, zeros where `new` is false."""
    if SIDE.VALUES:
        x = load_new(source.value, source.v_strides, b, h, fresh, new, first, SIDE)
        return _rotated(x, source.value, h, SIDE)
    else:
        return _rotated(load_new(source.key, source.k_strides, b, h, fresh, new, first, SIDE), source.key, h, SIDE)


@triton.jit
def new_tokens_of(source, b, h, fresh, new, first, SIDE: tl.constexpr, C: tl.constexpr):
    """Return keys or values, as `SIDE` says, and the flags of `new_tokens`.

    Checks the other side for non-finite numbers first and discards its tile; both tiles together would spill."""
    OTHER: tl.constexpr = C.K if SIDE.VALUES else C.V
    bad = broken(_tokens_of(source, b, h, fresh, new, first, OTHER), 1)
    x = _tokens_of(source, b, h, fresh, new, first, SIDE)
    bad = new & (bad | broken(x, 1))
    return tl.where(bad[:, None], 0.0, x), bad


@triton.jit
def _channels_of_ring(S, slot, SLOTS: tl.constexpr, bh, d, SIDE: tl.constexpr):
    """Return the addresses of `ring_codes` for channels `d` alone."""
    base = S.ring + bh.to(tl.int64) * SLOTS * SIDE.D
    if SIDE.VALUES and (S.ring.dtype.element_ty == tl.int8):
        return base + d[None, :] * SLOTS + slot[:, None]
    else:
        return base + slot[:, None] * SIDE.D + d[None, :]


@triton.jit
def ring_codes(S, slot, SLOTS: tl.constexpr, bh, SIDE: tl.constexpr):
    """Return addresses `[n, DP]` in a ring of `SLOTS` slots. INT8 values are stored `[D, slots]`, as their product
    reads them."""
    return _channels_of_ring(S, slot, SLOTS, bh, tl.arange(0, SIDE.DP), SIDE)


@triton.jit
def ring_tile(S, pos, d, bh, SIDE: tl.constexpr, C: tl.constexpr):
    """Return fp32 codes `[n, channels]` of the ring's tokens at row positions `pos`, of channels `d`; zeros beyond
    `D`."""
    inside = (pos >= 0)[:, None] & (d < SIDE.D)[None, :]
    return tl.load(_channels_of_ring(S, pos % C.RING, C.RING, bh, d, SIDE), mask=inside, other=0).to(tl.float32)


@triton.jit
def from_ring(S, pos, there, bh, SIDE: tl.constexpr, C: tl.constexpr):
    """Return codes fp32 `[n, DP]` and scales `[n]` of the ring's tokens at row positions `pos`, zeros where `there` is
    false. An unquantized ring gives numbers in place of codes, and zero scales."""
    inside = there[:, None] & (tl.arange(0, SIDE.DP) < SIDE.D)[None, :]
    code = tl.load(ring_codes(S, pos % C.RING, C.RING, bh, SIDE), mask=inside, other=0).to(tl.float32)
    scale = tl.zeros([code.shape[0]], tl.float32)
    if S.ring.dtype.element_ty == tl.int8:
        scale = tl.load(S.ring_scale + bh.to(tl.int64) * C.RING + pos % C.RING, mask=there, other=0.0)
    return code, scale


@triton.jit
def with_ring(S, code, scale, pos, old, bh, SIDE: tl.constexpr, C: tl.constexpr):
    """Return codes and scales of tokens at row positions `pos`: from the ring where `old` is true, else as given."""
    before, before_scale = from_ring(S, pos, old, bh, SIDE, C)
    return tl.where(old[:, None], before, code), tl.where(old, before_scale, scale)


@triton.jit
def row_before(LAYER, SPANS, span_stride, b, NB, C: tl.constexpr):
    """Return the `Row` of row `b` from the state and the call's mask.

    `count` is limited to the free capacity of `NB` blocks. A call closes the full spans of blocks that lie before the
    residual window."""
    state = RowState(*LAYER.rows)
    length, closed, open_start = tl.load(state.length + b), tl.load(state.closed + b), tl.load(state.open_start + b)
    first, count = tl.load(SPANS + b * span_stride), tl.load(SPANS + b * span_stride + 1)
    room = (NB - closed) * C.BLOCK - (length - open_start)
    if C.PAGED:  # rows without a token may have more blocks than the call's tables
        room = tl.maximum(room, 0)
    count = tl.minimum(count, room)
    ready = tl.maximum(length + count - open_start - C.RESIDUAL, 0)
    return Row(length, closed, open_start, ready // C.SPAN * (C.SPAN // C.BLOCK), first, count)
