"""Which heads of a row get 2 bits, decided when its first block closes: by one program a row, which ranks its heads."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats.head_bits import number
from qattn_kernels.jit.rows import slot_bits
from qattn_kernels.jit.tokens import chosen_bits, new_tokens, row_before, with_ring


@triton.jit
def _priority(S, code, scale, keep, pos, old, bh, BLOCK_FORM: tl.constexpr, KIND: tl.constexpr,
              VALUES: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """TurboAttention section 3.2 in fp64, as `formats.flashq.reference.head_priority`."""
    code, scale = with_ring(S, code, scale, pos, old, bh, VALUES, C)
    code, scale = BLOCK_FORM(code, scale, keep)
    x = code.to(tl.float64) * scale[:, None].to(tl.float64)
    inside = (tl.arange(0, C.DP) < C.D) & (tl.max(keep.to(tl.int32), 0) > 0)
    low = tl.min(tl.where(keep[:, None], x, float("inf")), 0)
    high = tl.max(tl.where(keep[:, None], x, float("-inf")), 0)
    gap = tl.where(inside, high - low, 0.0)
    head_gap = tl.max(tl.where(inside, high, float("-inf")), 0) - tl.min(tl.where(inside, low, float("inf")), 0)
    head_gap = tl.where(tl.max(keep.to(tl.int32), 0) > 0, head_gap, 0.0)
    mean = tl.sum(gap, 0) / C.D
    off = tl.where(tl.arange(0, C.DP) < C.D, gap - mean, 0.0)
    deviation = tl.sqrt(tl.sum(off * off, 0) / (C.D - 1))
    if KIND == 0:
        return head_gap * deviation
    elif KIND == 1:
        return head_gap
    else:
        return deviation


@triton.jit
def _places(S, priority, b, C: tl.constexpr):
    """Heads of lowest priority to the 2-bit places behind the others, ties to the lower head."""
    n = tl.arange(0, triton.next_power_of_2(C.H))
    real = n < C.H
    same = priority[None, :] == priority[:, None]
    less = (priority[None, :] < priority[:, None]) | (same & (n[None, :] < n[:, None]))
    rank = tl.sum((less & real[None, :]).to(tl.int32), 1)
    low = (rank < number(S.low)).to(tl.int32)
    low_row = tl.sum(tl.where(n[:, None] == n[None, :], low[:, None], 0), 0)
    before = (low_row[None, :] < low[:, None]) | ((low_row[None, :] == low[:, None]) & (n[None, :] < n[:, None]))
    place = tl.sum((before & real[None, :]).to(tl.int32), 1)
    tl.store(S.head_of + b * C.H + place, n, mask=real)


@triton.jit
def _head_priorities(KEY, VALUE, k_strides, v_strides, DROPPED, K, V, CHOSEN, open_blocks, NB, row, b, h,
                     K_QUANTIZE: tl.constexpr, K_BLOCK_FORM: tl.constexpr, V_QUANTIZE: tl.constexpr,
                     V_BLOCK_FORM: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
                     C: tl.constexpr):  # fmt: skip
    """Of the keys and of the values of a head in the row's first block; zero for a side that is not ranked."""
    t = tl.arange(0, C.BLOCK)
    pos = row.open_start + t
    old = pos < row.length
    new = (~old) & (pos < row.length + row.count)
    k, v, bad = new_tokens(KEY, VALUE, k_strides, v_strides, b, h, pos - row.length, new, row.first, C)
    flags = DROPPED + (b * C.H + h).to(tl.int64) * NB * (C.BLOCK // 8)
    gone = (tl.load(flags + t // 8).to(tl.int32) >> (t % 8)) & 1
    keep = (old | new) & (~bad) & ~(old & (gone == 1))
    k_priority, v_priority = tl.full([], 0, tl.float64), tl.full([], 0, tl.float64)
    if K_KIND >= 0:
        k_keep = keep
        if C.ENTRIES > 0:
            k_keep = keep & (slot_bits(chosen_bits(CHOSEN, open_blocks, b * C.H + h, 0, C), t) == 0)
        code, scale = K_QUANTIZE(k)
        k_priority = _priority(K, code, scale, k_keep, pos, old, b * C.H + h, K_BLOCK_FORM, K_KIND, False, C)
    if V_KIND >= 0:
        code, scale = V_QUANTIZE(v)
        v_priority = _priority(V, code, scale, keep, pos, old, b * C.H + h, V_BLOCK_FORM, V_KIND, True, C)
    return k_priority, v_priority


@triton.jit(do_not_specialize=["span_stride", "open_blocks", "NB"])
def priorities_kernel(KEY, VALUE, k_strides, v_strides, SPANS, span_stride, STATE, DROPPED, K, V, CHOSEN, open_blocks,
                      PRIORITIES, NB, K_QUANTIZE: tl.constexpr, K_BLOCK_FORM: tl.constexpr, V_QUANTIZE: tl.constexpr,
                      V_BLOCK_FORM: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
                      C: tl.constexpr):  # fmt: skip
    """Program (head, row) of a long call: `_head_priorities` to `PRIORITIES` fp64 `[B, 2, H]`, where the row's first
    block closes."""
    h, b = tl.program_id(0), tl.program_id(1)
    row = row_before(STATE, SPANS, span_stride, b, NB, C)
    if (row.closed == 0) & (row.closing > 0):
        k, v = _head_priorities(KEY, VALUE, k_strides, v_strides, DROPPED, K, V, CHOSEN, open_blocks, NB, row, b, h,
                                K_QUANTIZE, K_BLOCK_FORM, V_QUANTIZE, V_BLOCK_FORM, K_KIND, V_KIND, C)  # fmt: skip
        tl.store(PRIORITIES + 2 * b * C.H + h, k)
        tl.store(PRIORITIES + (2 * b + 1) * C.H + h, v)


@triton.jit(do_not_specialize=["span_stride", "open_blocks", "NB"])
def rank_kernel(KEY, VALUE, k_strides, v_strides, SPANS, span_stride, STATE, DROPPED, K, V, CHOSEN, open_blocks,
                PRIORITIES, NB, SHORT: tl.constexpr, K_QUANTIZE: tl.constexpr, K_BLOCK_FORM: tl.constexpr,
                V_QUANTIZE: tl.constexpr, V_BLOCK_FORM: tl.constexpr, K_KIND: tl.constexpr, V_KIND: tl.constexpr,
                C: tl.constexpr):  # fmt: skip
    """Program (row). `KIND` -1: that side is not ranked. `PRIORITIES`: of `priorities_kernel`, but for a `SHORT` call,
    which seldom closes a row's first block."""
    b = tl.program_id(0)
    row = row_before(STATE, SPANS, span_stride, b, NB, C)
    if (row.closed == 0) & (row.closing > 0):
        n = tl.arange(0, triton.next_power_of_2(C.H))
        if SHORT:
            k_priority = tl.full(n.shape, 0, tl.float64)
            v_priority = tl.full(n.shape, 0, tl.float64)
            for i in range(C.H):
                h = i + tl.full([], 0, tl.int32)  # the interpreter counts in Python's integers
                k, v = _head_priorities(KEY, VALUE, k_strides, v_strides, DROPPED, K, V, CHOSEN, open_blocks, NB, row,
                                        b, h, K_QUANTIZE, K_BLOCK_FORM, V_QUANTIZE, V_BLOCK_FORM, K_KIND, V_KIND,
                                        C)  # fmt: skip
                k_priority, v_priority = tl.where(n == h, k, k_priority), tl.where(n == h, v, v_priority)
        else:
            k_priority = tl.load(PRIORITIES + 2 * b * C.H + n, mask=n < C.H, other=0.0)
            v_priority = tl.load(PRIORITIES + (2 * b + 1) * C.H + n, mask=n < C.H, other=0.0)
        if K_KIND >= 0:
            _places(K, k_priority, b, C)
        if V_KIND >= 0:
            _places(V, v_priority, b, C)
