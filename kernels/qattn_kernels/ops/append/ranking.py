"""Rank the heads of a row and choose those that get 2 bits, when the row's first block closes.

In a long call, one program per row ranks its heads. In a short call, every head ranks all heads inside the append."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.head_bits import number
from qattn_kernels.jit.rows import slot_bits
from qattn_kernels.jit.tokens import Source, new_tokens_of, row_before, with_ring
from qattn_kernels.layout import BlockState
from qattn_kernels.ops.sink_pool.kernel import first_sinks, key_sizes


class Masks(NamedTuple):
    """Pointer to the mask bits of all blocks, and the number of blocks per head."""

    dropped: Any
    blocks: Any


@triton.jit
def _priority(S, code, scale, keep, pos, old, bh, BLOCK_FORM: tl.constexpr, SIDE: tl.constexpr,
              C: tl.constexpr):  # fmt: skip
    """Return the priority fp64 of a head from its block's tokens (TurboAttention, section 3.2). `SIDE.RANK` chooses the
    measure. `formats.flashq.priority.head_priority` is the specification."""
    code, scale = with_ring(S, code, scale, pos, old, bh, SIDE, C)
    code, scale = BLOCK_FORM(code, scale, keep)
    x = code * scale[:, None]
    inside = (tl.arange(0, SIDE.DP) < SIDE.D) & (tl.max(keep.to(tl.int32), 0) > 0)
    low = tl.min(tl.where(keep[:, None], x, float("inf")), 0).to(tl.float64)
    high = tl.max(tl.where(keep[:, None], x, float("-inf")), 0).to(tl.float64)
    gap = tl.where(inside, high - low, 0.0)
    head_gap = tl.max(tl.where(inside, high, float("-inf")), 0) - tl.min(tl.where(inside, low, float("inf")), 0)
    head_gap = tl.where(tl.max(keep.to(tl.int32), 0) > 0, head_gap, 0.0)
    mean = tl.sum(gap, 0) / SIDE.D
    off = tl.where(tl.arange(0, SIDE.DP) < SIDE.D, gap - mean, 0.0)
    deviation = tl.sqrt(tl.sum(off * off, 0) / (SIDE.D - 1))
    if SIDE.RANK == 0:
        return head_gap * deviation
    elif SIDE.RANK == 1:
        return head_gap
    else:
        return deviation


@triton.jit
def _places(S, priority, C: tl.constexpr):
    """Return the place `[H]` of each head from priorities `[H]`: the heads of lowest priority get 2 bits, and their
    places are after the others'.

    Ties go to the lower head."""
    n = tl.arange(0, triton.next_power_of_2(C.H))
    real = n < C.H
    same = priority[None, :] == priority[:, None]
    less = (priority[None, :] < priority[:, None]) | (same & (n[None, :] < n[:, None]))
    rank = tl.sum((less & real[None, :]).to(tl.int32), 1)
    low = (rank < number(S.low)).to(tl.int32)
    low_row = tl.sum(tl.where(n[:, None] == n[None, :], low[:, None], 0), 0)
    before = (low_row[None, :] < low[:, None]) | ((low_row[None, :] == low[:, None]) & (n[None, :] < n[:, None]))
    return tl.sum((before & real[None, :]).to(tl.int32), 1)


@triton.jit(noinline=True)
def _head_priority(S, source, masks, row, b, h, QUANTIZE: tl.constexpr, BLOCK_FORM: tl.constexpr,
                   SIDE: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Return the priority of one head's keys or values in the row's first block.

    A separate, non-inlined function: inlined, it would double the registers of a step."""
    t = tl.arange(0, C.BLOCK)
    pos = row.open_start + t
    old = pos < row.length
    new = (~old) & (pos < row.length + row.count)
    x, bad = new_tokens_of(source, b, h, pos - row.length, new, row.first, SIDE, C)
    flags = masks.dropped + (b * C.H + h).to(tl.int64) * masks.blocks * (C.BLOCK // 8)
    keep = (old | new) & (~bad) & ~(old & (slot_bits(flags, t) == 1))
    if C.ENTRIES > 0 and not SIDE.VALUES:  # leave out the tokens that the pool, still empty, will take
        size = key_sizes(source, S, flags, row, b, h, 0, QUANTIZE, C)
        keep = keep & ~first_sinks(size, C)
    code, scale = QUANTIZE(x)
    return _priority(S, code, scale, keep, pos, old, b * C.H + h, BLOCK_FORM, SIDE, C)


@triton.jit
def ranked_place(S, source, masks, row, b, h, QUANTIZE: tl.constexpr, BLOCK_FORM: tl.constexpr, SIDE: tl.constexpr,
                 C: tl.constexpr):  # fmt: skip
    """Return and store the place of head `h`, inside the append of a short call that closes the row's first block.

    Every head ranks all heads. This happens once per row and saves a launch in every step."""
    n = tl.arange(0, triton.next_power_of_2(C.H))
    priority = tl.full(n.shape, 0, tl.float64)
    for i in range(C.H):
        other = i + tl.full([], 0, tl.int32)  # a tensor also in the interpreter, where `i` is a Python int
        found = _head_priority(S, source, masks, row, b, other, QUANTIZE, BLOCK_FORM, SIDE, C)
        priority = tl.where(n == other, found, priority)
    place = tl.sum(tl.where(n == h, _places(S, priority, C), 0), 0)
    tl.store(S.head_of + b * C.H + place, h)
    return place


@triton.jit(do_not_specialize=["span_stride", "NB"])
def priorities_kernel(SOURCE, SPANS, span_stride, LAYER, PRIORITIES, NB, K_QUANTIZE: tl.constexpr,
                      K_BLOCK_FORM: tl.constexpr, V_QUANTIZE: tl.constexpr, V_BLOCK_FORM: tl.constexpr,
                      C: tl.constexpr):  # fmt: skip
    """Write head priorities to `PRIORITIES` fp64 `[B, 2, H]`, keys then values. One program per (head, row).

    Runs in long calls. Writes only ranked sides, and only rows whose first block closes."""
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    h, b = tl.program_id(0), tl.program_id(1)
    row = row_before(LAYER, SPANS, span_stride, b, NB, C)
    if (row.closed == 0) & (row.closing > 0):
        source, masks = Source(*SOURCE), Masks(BlockState(*LAYER.blocks).dropped, NB)
        if K_SIDE.RANK >= 0:
            found = _head_priority(LAYER.k, source, masks, row, b, h, K_QUANTIZE, K_BLOCK_FORM, K_SIDE, C)
            tl.store(PRIORITIES + 2 * b * C.H + h, found)
        if V_SIDE.RANK >= 0:
            found = _head_priority(LAYER.v, source, masks, row, b, h, V_QUANTIZE, V_BLOCK_FORM, V_SIDE, C)
            tl.store(PRIORITIES + (2 * b + 1) * C.H + h, found)


@triton.jit(do_not_specialize=["span_stride", "NB"])
def rank_kernel(SPANS, span_stride, LAYER, PRIORITIES, NB, C: tl.constexpr):
    """Store the places of all heads whose row closes its first block. One program per row, after
    `priorities_kernel`."""
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    b = tl.program_id(0)
    row = row_before(LAYER, SPANS, span_stride, b, NB, C)
    if (row.closed == 0) & (row.closing > 0):
        n = tl.arange(0, triton.next_power_of_2(C.H))
        real = n < C.H
        if K_SIDE.RANK >= 0:
            place = _places(LAYER.k, tl.load(PRIORITIES + 2 * b * C.H + n, mask=real, other=0.0), C)
            tl.store(LAYER.k.head_of + b * C.H + place, n, mask=real)
        if V_SIDE.RANK >= 0:
            place = _places(LAYER.v, tl.load(PRIORITIES + (2 * b + 1) * C.H + n, mask=real, other=0.0), C)
            tl.store(LAYER.v.head_of + b * C.H + place, n, mask=real)
