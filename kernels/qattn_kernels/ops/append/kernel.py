"""Append and close in Triton: one program a block of the open span (open and new tokens), KV head and row;
`reference.py` specifies it.

A short call has at most 32 tokens and is followed by a decode. After a long one comes a prefill, which reads past and
new tokens unpacked (`launch.unpacked_kv.UnpackedKV`). A format without a ring (`C.RING == 0`) gives
tokens their final form at once. `S` is the tensors of one side, keys or values; `C` a `launch.constants.Sizes`.

Every kernel here makes codes, so it is launched with `enable_fp_fusion=False`: a product fused into a rounding would
give other codes than the reference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.jit.rows import (
    OVERFLOW,
    ROW_FIELDS,
    block_at,
    commit_row,
    first_block,
    load_row,
    settle_sinks,
    slot_bits,
    store_row,
)
from qattn_kernels.jit.tokens import chosen_bits, from_ring, new_tokens, ring_codes, row_before, with_ring
from qattn_kernels.launch.unpacked_kv import UnpackedTensors
from qattn_kernels.layout import RowState
from qattn_kernels.ops.append.smooth import dequantize, mean_key, minus_mean
from qattn_kernels.ops.rotate.kernel import rotate_queries


class Codec(NamedTuple):
    """Functions of a format; `formats.contract.JitFormat` says what each does. Made in the call that takes it: a
    variable inside a kernel can hold no functions."""

    quantize_tokens: Any
    block_form: Any
    place: Any
    put: Any
    get: Any


class Block(NamedTuple):
    """The block of the open span that a program writes.

    Attributes:
        b, h, bh: row, KV head, and both as one index.
        row: the `layout.Row`.
        index: of the block among those of its row.
        home: the `Home` of its codes.
        start: row position of its first token.
        used: whether it holds a token of the row.
        closes: whether it is packed in this call.
        flags: pointer to the mask bits of the head's first block.
        chosen: pointer to the bits of the block's tokens that the sink pool took.
    """

    b: Any
    h: Any
    bh: Any
    row: Any
    index: Any
    home: Any
    start: Any
    used: Any
    closes: Any
    flags: Any
    chosen: Any


class Home(NamedTuple):
    """Where the codes of a block lie: block `index` of row `b`, whose heads have room for `capacity` each. In a pool a
    page of the only row."""

    b: Any
    index: Any
    capacity: Any


class Tokens(NamedTuple):
    """Tokens of a block in a long call, `[BLOCK]`: row positions, slots of the unpacked keys and values, whether they
    were there before the call, and whether they are tokens at all and not masked."""

    pos: Any
    slot: Any
    old: Any
    keep: Any


class UnpackedSide(NamedTuple):
    """Unpacked keys or values: codes or numbers, scales, and how many slots a head has."""

    x: Any
    scale: Any
    slots: Any


@triton.jit
def to_ring(S, code, scale, pos, write, bh, VALUES: tl.constexpr, C: tl.constexpr):
    """Open tokens at row positions `pos` into their slots, where `write` holds."""
    inside = write[:, None] & (tl.arange(0, C.DP) < C.D)[None, :]
    tl.store(ring_codes(S, pos % C.RING, C.RING, bh, VALUES, C), code.to(S.ring.dtype.element_ty), mask=inside)
    if S.ring.dtype.element_ty == tl.int8:
        tl.store(S.ring_scale + bh.to(tl.int64) * C.RING + pos % C.RING, scale, mask=write)


@triton.jit
def store_unpacked(side, x, scale, bh, slot, VALUES: tl.constexpr, C: tl.constexpr):
    """Tokens `[BLOCK, DP]` of consecutive slots: keys `[slots, D]`, INT8 values `[D, slots]`."""
    d, slots = tl.arange(0, C.DP), side.slots
    base = side.x + bh.to(tl.int64) * slots * C.D
    if side.x.dtype.element_ty == tl.int8:
        if VALUES:
            where = base + d[:, None].to(tl.int64) * slots + slot[None, :]
            tl.store(where, tl.trans(x.to(tl.int8)), mask=(d < C.D)[:, None])
        else:
            where = base + slot[:, None].to(tl.int64) * C.D + d[None, :]
            tl.store(where, x.to(tl.int8), mask=(d < C.D)[None, :])
        tl.store(side.scale + bh.to(tl.int64) * slots + slot, scale)
    else:
        where = base + slot[:, None].to(tl.int64) * C.D + d[None, :]
        tl.store(where, x.to(side.x.dtype.element_ty), mask=(d < C.D)[None, :])


@triton.jit
def _row_mean(S, K_MEAN, block, C: tl.constexpr):
    """The mean key that a block of a short call subtracts from its keys; the row's first block fixes it."""
    d, bh = tl.arange(0, C.DP), block.bh
    if block.row.closed == 0:
        t = tl.arange(0, C.BLOCK)
        code, scale = from_ring(S, block.start - block.index * C.BLOCK + t, t >= 0, bh, False, C)
        first = (block.home.index - block.index) * C.BLOCK  # of the row's first block: in a pool no other one closes
        mean = mean_key(dequantize(S, code, scale), slot_bits(block.flags, first + t) == 0, True)  # of a full block
        if block.index == 0:
            tl.store(K_MEAN + bh * C.D + d, mean, mask=d < C.D)
    else:
        mean = tl.load(K_MEAN + bh * C.D + d, mask=d < C.D, other=0.0)
    return mean


@triton.jit
def _among(at, pos, those):
    """1 at the positions `at` `[BLOCK]` that are one of `pos` `[NEW]` where `those` holds."""
    return tl.max((at[:, None] == tl.where(those, pos, -1)[None, :]).to(tl.int32), 1)


@triton.jit
def _short_side(S, K_MEAN, x, pos, new, bad, stale, block, codec, VALUES: tl.constexpr, C: tl.constexpr):
    """Keys or values of a short call in one block: new tokens into the ring or the arenas, the full block closed.
    `bad`: those of the new tokens that are masked, whose bits may not be written yet. `stale`: a crop left tokens
    behind the row's end."""
    b, h, bh, home = block.b, block.h, block.bh, block.home
    code, scale = codec.quantize_tokens(x)
    t = tl.arange(0, C.BLOCK)
    if C.RING == 0:
        codec.put(S, code, scale, new, new, pos - block.start, home.b, h, home.index, home.capacity, h, VALUES, C)
        if stale:
            empty = tl.full([C.BLOCK, C.DP], 0.0, tl.float32)
            behind = block.start + t > tl.max(tl.where(new, pos, 0), 0)
            codec.put(S, empty, tl.max(empty, 1), behind, behind, t, home.b, h, home.index, home.capacity, h, VALUES, C)
    else:
        to_ring(S, code, scale, pos, new, bh, VALUES, C)
        if block.closes:
            tl.debug_barrier()  # the block is read back by other threads than wrote its last tokens
            full, full_scale = from_ring(S, block.start + t, t >= 0, bh, VALUES, C)
            masked = slot_bits(block.flags, home.index * C.BLOCK + t) | _among(block.start + t, pos, bad)
            keep = masked == 0
            if C.ENTRIES > 0 and not VALUES:  # values stay in: see `ops/sink_pool/reference.py`
                keep = keep & (slot_bits(block.chosen, t) == 0)
            if C.SMOOTH_K and not VALUES:
                mean = _row_mean(S, K_MEAN, block, C)
                full, full_scale = codec.quantize_tokens(minus_mean(S, full, full_scale, keep, mean))
            full, full_scale = codec.block_form(full, full_scale, keep)
            place = codec.place(S, b, h, block.index == 0, VALUES, C)
            codec.put(S, full, full_scale, keep, keep, t, home.b, h, home.index, home.capacity, place, VALUES, C)


@triton.jit
def _long_side(S, K_MEAN, x, tokens, unpacked, block, codec, OLD: tl.constexpr, VALUES: tl.constexpr,
               C: tl.constexpr):  # fmt: skip
    """Keys or values of one block of a long call: unpacked for the prefill, and into the arenas if it closes or the
    format has no ring. `K_MEAN`: the mean that this call subtracts from its keys (`k_mean.mean_kernel`). `OLD`: there
    may be tokens from before the call, which the ring holds."""
    b, h, bh, index, capacity, keep = block.b, block.h, block.bh, block.index, block.home.capacity, tokens.keep
    t = tl.arange(0, C.BLOCK)
    code, scale = codec.quantize_tokens(x)
    if C.RING > 0:
        if OLD:
            code, scale = with_ring(S, code, scale, tokens.pos, tokens.old, bh, VALUES, C)
        if C.SMOOTH_K and not VALUES:
            d = tl.arange(0, C.DP)
            mean = tl.load(K_MEAN + bh * C.D + d, mask=d < C.D, other=0.0)
            kept, kept_scale = codec.quantize_tokens(minus_mean(S, code, scale, keep, mean))
            kept, kept_scale = codec.block_form(kept, kept_scale, keep)
            if block.closes:
                place = codec.place(S, b, h, index == 0, VALUES, C)
                codec.put(S, kept, kept_scale, keep, keep, t, b, h, index, capacity, place, VALUES, C)
            if unpacked.x.dtype.element_ty == tl.int8:
                code, scale = kept, kept_scale
        elif block.closes:
            place = codec.place(S, b, h, index == 0, VALUES, C)
            if C.ENTRIES > 0 and not VALUES:  # the call's own tokens see sinks where they stand
                keep = keep & (slot_bits(block.chosen, t) == 0)
                kept, kept_scale = codec.block_form(code, scale, keep)
                codec.put(S, kept, kept_scale, keep, keep, t, b, h, index, capacity, place, VALUES, C)
                code, scale = codec.block_form(code, scale, t >= 0)
            else:
                code, scale = codec.block_form(code, scale, keep)
                codec.put(S, code, scale, keep, keep, t, b, h, index, capacity, place, VALUES, C)
        elif (unpacked.x.dtype.element_ty == tl.int8) and (S.ring.dtype.element_ty != tl.int8):
            code, scale = codec.block_form(code, scale, keep)  # open tokens have no codes of their own: as if it closed
    else:
        if block.used:
            codec.put(S, code, scale, keep, ~tokens.old, t, b, h, index, capacity, h, VALUES, C)
        code, scale = codec.block_form(code, scale, keep)
        before, before_scale = codec.get(S, b, h, tl.minimum(index, capacity - 1), capacity, h, VALUES, C)
        code = tl.where(tokens.old[:, None], before.to(tl.float32), code)
        scale = tl.where(tokens.old, before_scale, scale)
    store_unpacked(unpacked, code, scale, bh, tokens.slot, VALUES, C)


@triton.jit
def _long_sides(K, V, K_MEAN, k, v, tokens, unpacked, slots, block, k_codec, v_codec, OLD: tl.constexpr,
                C: tl.constexpr):  # fmt: skip
    k_side, v_side = (
        UnpackedSide(unpacked.k, unpacked.k_scale, slots),
        UnpackedSide(unpacked.v, unpacked.v_scale, slots),
    )
    _long_side(K, K_MEAN, k, tokens, k_side, block, k_codec, OLD, False, C)
    V_C: tl.constexpr = C.V
    _long_side(V, K_MEAN, v, tokens, v_side, block, v_codec, OLD, True, V_C)


@triton.jit
def _home(PAGES, b, index, NB, C: tl.constexpr):
    """Where block `index` of a row with `NB` lies."""
    if C.PAGED:
        return Home(0, block_at(PAGES, b, index, NB, C), PAGES[1])
    else:
        return Home(b, index, NB)


@triton.jit
def _note(ROWS, SPANS, span_stride, BLOCK_POS, BLOCK_LEN, row, j, closes, b, h, home, C: tl.constexpr):
    """What is one for all heads: the row's numbers for later kernels, behind them the tokens that do not fit, and the
    block that closes."""
    if h == 0:
        if j == 0:
            store_row(ROWS, b, row)
            tl.store(ROWS + b * ROW_FIELDS + OVERFLOW, tl.load(SPANS + b * span_stride + 1) - row.count)
        if closes:
            at = home.b * home.capacity + home.index
            tl.store(BLOCK_POS + at, row.open_start + j * C.BLOCK)
            tl.store(BLOCK_LEN + at, C.BLOCK)


@triton.jit
def _drop(flags, NONFINITE, gone, bad, index, bh, C: tl.constexpr):
    """Bits of a block's masked tokens `gone` `[BLOCK]`, and the count of the new ones among them."""
    eights = tl.reshape(gone << (tl.arange(0, C.BLOCK) % 8), (C.BLOCK // 8, 8))
    tl.store(flags + index * (C.BLOCK // 8) + tl.arange(0, C.BLOCK // 8), tl.sum(eights, 1).to(tl.uint8))
    worse = tl.sum(bad.to(tl.int64), 0)
    if worse > 0:
        tl.atomic_add(NONFINITE + bh, worse)


@triton.jit(do_not_specialize=["span_stride", "open_blocks", "NB", "T", "parts"])
def short_kernel(KEY, VALUE, k_strides, v_strides, SPANS, span_stride, STATE, DROPPED, NONFINITE, BLOCK_POS, BLOCK_LEN,
                 K, V, K_MEAN, CHOSEN, open_blocks, ROWS, PAGES, NB, QUERIES, T, parts, K_QUANTIZE: tl.constexpr,
                 K_BLOCK_FORM: tl.constexpr, K_PLACE: tl.constexpr, K_PUT: tl.constexpr, V_QUANTIZE: tl.constexpr,
                 V_BLOCK_FORM: tl.constexpr, V_PLACE: tl.constexpr, V_PUT: tl.constexpr, NEW: tl.constexpr,
                 C: tl.constexpr):  # fmt: skip
    """Program (head, row, part of a block of the open span) of a call of at most `NEW` tokens; the decode commits the
    lengths. `parts`: of a block, 1, or 2 for keys and values in programs of their own: those of keys, which take
    longest, start first, and each multiprocessor gets as many of them.
    `SPANS`: the call's mask, the first real column of each row's new tokens and how many follow. `CHOSEN`: bits of the
    tokens that the sink pool took, of `open_blocks` blocks a head. `PAGES`: see `jit.rows.block_at`.
    `QUERIES`: those of `T` tokens, where they go rotated, and the strides of both; where keys are rotated the last
    program of a head and row writes them, which may have no block, else nobody reads it."""
    h, b, i = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    j, part = i // parts, i % parts
    row = row_before(STATE, SPANS, span_stride, b, NB, C)
    length, closed, open_start, closing, first, count = row
    start, index, bh = open_start + j * C.BLOCK, closed + j, b * C.H + h
    used = (start < length + count) & (index < NB)  # never behind the arenas
    closes = (j < closing) & used
    home = _home(PAGES, b, index, NB, C)
    if part == 0:
        _note(ROWS, SPANS, span_stride, BLOCK_POS, BLOCK_LEN, row, j, closes, b, h, home, C)
    if used:
        pos = tl.maximum(length, start) + tl.arange(0, NEW)
        new = pos < tl.minimum(length + count, start + C.BLOCK)
        k, v, bad = new_tokens(KEY, VALUE, k_strides, v_strides, b, h, pos - length, new, first, C)
        flags = DROPPED + first_block(PAGES, b, h, NB, C) * (C.BLOCK // 8)
        if (part == 0) & (tl.max(bad.to(tl.int32), 0) > 0):
            t = tl.arange(0, C.BLOCK)
            gone = slot_bits(flags, home.index * C.BLOCK + t) | _among(start + t, pos, bad)
            tl.debug_barrier()  # every bit is read before a byte is written
            _drop(flags, NONFINITE, gone, bad, home.index, bh, C)
        stale = length < tl.load(RowState(*STATE).longest + b)
        chosen = chosen_bits(CHOSEN, open_blocks, bh, j, C)
        block = Block(b, h, bh, row, index, home, start, used, closes, flags, chosen)
        if part == 0:
            _short_side(K, K_MEAN, k, pos, new, bad, stale, block,
                        Codec(K_QUANTIZE, K_BLOCK_FORM, K_PLACE, K_PUT, None), False, C)  # fmt: skip
        if part == parts - 1:
            V_C: tl.constexpr = C.V
            _short_side(V, K_MEAN, v, pos, new, bad, stale, block,
                        Codec(V_QUANTIZE, V_BLOCK_FORM, V_PLACE, V_PUT, None), True, V_C)  # fmt: skip
    if C.ROTATION is not None:
        if i == tl.num_programs(2) - 1:
            rotate_queries(QUERIES, b, h, T, C)


@triton.jit(do_not_specialize=["span_stride", "open_blocks", "NB"])
def long_kernel(KEY, VALUE, k_strides, v_strides, SPANS, span_stride, STATE, DROPPED, NONFINITE, BLOCK_POS, BLOCK_LEN,
                K, V, K_MEAN, CHOSEN, open_blocks, UNPACKED, ROWS, NB, slots, K_QUANTIZE: tl.constexpr,
                K_BLOCK_FORM: tl.constexpr, K_PLACE: tl.constexpr, K_PUT: tl.constexpr, K_GET: tl.constexpr,
                V_QUANTIZE: tl.constexpr, V_BLOCK_FORM: tl.constexpr, V_PLACE: tl.constexpr, V_PUT: tl.constexpr,
                V_GET: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Program (block of the open span, head, row) of a long call. Its tokens also go to `UNPACKED` (`UnpackedTensors`),
    and into the ring only when all have read it. Every program writes its slots, those behind the row's end included.
    """
    j, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    unpacked = UnpackedTensors(*UNPACKED)
    row = row_before(STATE, SPANS, span_stride, b, NB, C)
    length, closed, open_start, closing, first, count = row
    index, bh, t = closed + j, b * C.H + h, tl.arange(0, C.BLOCK)
    pos = open_start + j * C.BLOCK + t
    used = (open_start + j * C.BLOCK < length + count) & (index < NB)
    closes = (j < closing) & used
    home = Home(b, index, NB)
    _note(ROWS, SPANS, span_stride, BLOCK_POS, BLOCK_LEN, row, j, closes, b, h, home, C)
    old = pos < length
    new = (~old) & (pos < length + count)
    k, v, bad = new_tokens(KEY, VALUE, k_strides, v_strides, b, h, pos - length, new, first, C)
    flags = DROPPED + bh.to(tl.int64) * NB * (C.BLOCK // 8)
    slot = index * C.BLOCK + t
    gone = tl.where(old, slot_bits(flags, tl.where(old, slot, 0)), bad.to(tl.int32))
    keep = (old | new) & (gone == 0)
    if used:
        tl.debug_barrier()  # every bit is read before a byte is written
        _drop(flags, NONFINITE, gone, bad, index, bh, C)
    tl.store(unpacked.bias + bh.to(tl.int64) * slots + slot, tl.where(keep, 0.0, float("-inf")))
    if h == 0:
        tl.store(unpacked.pos + b.to(tl.int64) * slots + slot, pos)
    chosen = chosen_bits(CHOSEN, open_blocks, bh, j, C)
    block = Block(b, h, bh, row, index, home, open_start + j * C.BLOCK, used, closes, flags, chosen)
    tokens = Tokens(pos, slot, old, keep)
    # Only the call's first block holds older tokens. Threads read the ring in another order than new tokens, into which
    # values would be brought before their maxima are taken: at twice the cost, in every block.
    if (C.RING == 0) | (open_start + j * C.BLOCK < length):
        _long_sides(K, V, K_MEAN, k, v, tokens, unpacked, slots, block,
                    Codec(K_QUANTIZE, K_BLOCK_FORM, K_PLACE, K_PUT, K_GET),
                    Codec(V_QUANTIZE, V_BLOCK_FORM, V_PLACE, V_PUT, V_GET), True, C)  # fmt: skip
    else:
        _long_sides(K, V, K_MEAN, k, v, tokens, unpacked, slots, block,
                    Codec(K_QUANTIZE, K_BLOCK_FORM, K_PLACE, K_PUT, K_GET),
                    Codec(V_QUANTIZE, V_BLOCK_FORM, V_PLACE, V_PUT, V_GET), False, C)  # fmt: skip


@triton.jit(do_not_specialize=["NB", "B", "T"])
def finish_kernel(KEY, VALUE, k_strides, v_strides, ROWS, STATE, DROPPED, K, V, TABLE, NB, B, T,
                  K_QUANTIZE: tl.constexpr, V_QUANTIZE: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """After a long call: program (tile of the ring, head, row) writes the newest tokens, one a head what the call did
    to its sinks, and one the row's lengths."""
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = load_row(ROWS, b)
    if C.RING > 0:
        last = row.length + row.count - 1
        at = i * C.BLOCK + tl.arange(0, C.BLOCK)
        pos = last - (last - at + C.RING) % C.RING
        new = (at < C.RING) & (pos >= row.length)
        k, v, bad = new_tokens(KEY, VALUE, k_strides, v_strides, b, h, pos - row.length, new, row.first, C)
        k_code, k_scale = K_QUANTIZE(k)
        v_code, v_scale = V_QUANTIZE(v)
        to_ring(K, k_code, k_scale, pos, new, b * C.H + h, False, C)
        V_C: tl.constexpr = C.V
        to_ring(V, v_code, v_scale, pos, new, b * C.H + h, True, V_C)
    if C.ENTRIES > 0:
        if i == 0:
            settle_sinks(TABLE, DROPPED, row, b * C.H + h, NB, C)
    if (i == 0) & (h == 0):
        commit_row(ROWS, STATE, row, b, B, T, C)
