"""Append and close of a short call in Triton: one program a block of the open span (open and new tokens), KV head and
row, or one for its keys and one for its values; `reference.py` specifies it. Of a long call: `long_call.py`.

A short call has at most 32 tokens and is followed by a decode. A format without a ring (`C.RING == 0`) gives tokens
their final form at once. `S` is the tensors of one side, keys or values; `C` a `launch.constants.Sizes`.

Every kernel here makes codes, so it is launched with `enable_fp_fusion=False`: a product fused into a rounding would
give other codes than the reference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.contract import Slot, Tokens
from qattn_kernels.jit.rows import OVERFLOW, ROW_FIELDS, bits_at, block_at, first_bits, slot_bits, store_row
from qattn_kernels.jit.tokens import Source, checked_tokens, from_ring, load_new, new_tokens, ring_codes, row_before
from qattn_kernels.launch.call import SinkTensors
from qattn_kernels.layout import BlockState, RowState
from qattn_kernels.ops.append.ranking import Masks, ranked_place
from qattn_kernels.ops.append.smooth import dequantize, mean_key, minus_mean
from qattn_kernels.ops.rotate.kernel import rotate_queries
from qattn_kernels.ops.sink_pool.kernel import compete


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


class Home(NamedTuple):
    """Where the codes of a block lie: block `index` of row `b`, whose heads have room for `capacity` each. In a pool a
    page of the only row."""

    b: Any
    index: Any
    capacity: Any


@triton.jit
def to_ring(S, code, scale, pos, write, bh, SIDE: tl.constexpr, C: tl.constexpr):
    """Open tokens at row positions `pos` into their slots, where `write` holds."""
    inside = write[:, None] & (tl.arange(0, SIDE.DP) < SIDE.D)[None, :]
    tl.store(ring_codes(S, pos % C.RING, C.RING, bh, SIDE), code.to(S.ring.dtype.element_ty), mask=inside)
    if S.ring.dtype.element_ty == tl.int8:
        tl.store(S.ring_scale + bh.to(tl.int64) * C.RING + pos % C.RING, scale, mask=write)


@triton.jit
def _row_mean(S, K_MEAN, block, C: tl.constexpr):
    """The mean key that a block of a short call subtracts from its keys; the row's first block fixes it."""
    SIDE: tl.constexpr = C.K
    d, bh = tl.arange(0, SIDE.DP), block.bh
    if block.row.closed == 0:
        t = tl.arange(0, C.BLOCK)
        code, scale = from_ring(S, block.start - block.index * C.BLOCK + t, t >= 0, bh, SIDE, C)
        first = (block.home.index - block.index) * C.BLOCK  # of the row's first block: in a pool no other one closes
        mean = mean_key(dequantize(S, code, scale), slot_bits(block.flags, first + t) == 0, True)  # of a full block
        if block.index == 0:
            tl.store(K_MEAN + bh * SIDE.D + d, mean, mask=d < SIDE.D)
    else:
        mean = tl.load(K_MEAN + bh * SIDE.D + d, mask=d < SIDE.D, other=0.0)
    return mean


@triton.jit
def _among(at, pos, those):
    """1 at the positions `at` `[BLOCK]` that are one of `pos` `[NEW]` where `those` holds."""
    return tl.max((at[:, None] == tl.where(those, pos, -1)[None, :]).to(tl.int32), 1)


class Arrivals(NamedTuple):
    """The new tokens of a block in a short call, `[NEW]`.

    Attributes:
        pos: their row positions.
        new: whether they are tokens of the block.
        bad: those that are masked, whose bits may not be written yet.
    """

    pos: Any
    new: Any
    bad: Any


@triton.jit
def own_place(S, b, h, first, codec, SIDE: tl.constexpr, C: tl.constexpr):
    """Where the codes of head `h` go, noted when the row's `first` block closes, unless rows rank their heads."""
    if codec.place is None:
        return h
    else:
        return codec.place(S, b, h, first, SIDE, C)


@triton.jit
def _place(S, source, masks, block, codec, SIDE: tl.constexpr, C: tl.constexpr):
    """Where the codes of the block's head go: decided when the row's first block closes."""
    b, h, row = block.b, block.h, block.row
    place = own_place(S, b, h, block.index == 0, codec, SIDE, C)
    if SIDE.RANK >= 0:
        if row.closed == 0:
            place = ranked_place(S, source, masks, row, b, h, codec.quantize_tokens, codec.block_form, SIDE, C)
    return place


@triton.jit
def _short_side(S, K_MEAN, x, arrivals, stale, chosen, source, masks, block, codec, SIDE: tl.constexpr,
                C: tl.constexpr):  # fmt: skip
    """Keys or values of a short call in one block: new tokens into the ring or the arenas, the full block closed.
    `stale`: a crop left tokens behind the row's end. `chosen`: the tokens `[BLOCK]` that the sink pool takes."""
    h, bh, home, pos, new = block.h, block.bh, block.home, arrivals.pos, arrivals.new
    code, scale = codec.quantize_tokens(x)
    t = tl.arange(0, C.BLOCK)
    if C.RING == 0:
        slot = Slot(home.b, h, home.index, home.capacity, h)
        codec.put(S, Tokens(code, scale, new, new, pos - block.start), slot, SIDE, C)
        if stale:
            empty = tl.full([C.BLOCK, SIDE.DP], 0.0, tl.float32)
            behind = block.start + t > tl.max(tl.where(new, pos, 0), 0)
            codec.put(S, Tokens(empty, tl.max(empty, 1), behind, behind, t), slot, SIDE, C)
    else:
        to_ring(S, code, scale, pos, new, bh, SIDE, C)
        if block.closes:
            place = _place(S, source, masks, block, codec, SIDE, C)
            tl.debug_barrier()  # the block is read back by other threads than wrote its last tokens
            full, full_scale = from_ring(S, block.start + t, t >= 0, bh, SIDE, C)
            masked = slot_bits(block.flags, home.index * C.BLOCK + t) | _among(block.start + t, pos, arrivals.bad)
            keep = masked == 0
            if C.ENTRIES > 0 and not SIDE.VALUES:  # values stay in: see `ops/sink_pool/reference.py`
                keep = keep & ~chosen
            if SIDE.SMOOTH:
                mean = _row_mean(S, K_MEAN, block, C)
                full, full_scale = codec.quantize_tokens(minus_mean(S, full, full_scale, keep, mean))
            full, full_scale = codec.block_form(full, full_scale, keep)
            slot = Slot(home.b, h, home.index, home.capacity, place)
            codec.put(S, Tokens(full, full_scale, keep, keep, t), slot, SIDE, C)


@triton.jit
def _home(PAGES, b, index, NB, C: tl.constexpr):
    """Where block `index` of a row with `NB` lies."""
    if C.PAGED:
        return Home(0, block_at(PAGES, b, index, NB, C), PAGES[1])
    else:
        return Home(b, index, NB)


@triton.jit
def _flags(DROPPED, PAGES, b, h, index, home, NB, C: tl.constexpr):
    """Base of the mask bits of a row's block `index`, for offsets that count from `home.index`."""
    return first_bits(DROPPED, PAGES, b, h, NB, C) + (bits_at(home.index, index, C) - home.index) * (C.BLOCK // 8)


@triton.jit
def note_block(ROWS, SPANS, span_stride, blocks, block, j, C: tl.constexpr):
    """What is one for all heads: the row's numbers for later kernels, behind them the tokens that do not fit, and block
    `j` of the open span, if it closes."""
    b, row = block.b, block.row
    if block.h == 0:
        if j == 0:
            store_row(ROWS, b, row)
            tl.store(ROWS + b * ROW_FIELDS + OVERFLOW, tl.load(SPANS + b * span_stride + 1) - row.count)
        if block.closes:
            at = block.home.b * block.home.capacity + block.home.index
            tl.store(blocks.block_pos + at, row.open_start + j * C.BLOCK)
            tl.store(blocks.block_len + at, C.BLOCK)


@triton.jit
def drop_bits(flags, NONFINITE, gone, bad, index, bh, C: tl.constexpr):
    """Bits of a block's masked tokens `gone` `[BLOCK]`, and the count of the new ones among them."""
    eights = tl.reshape(gone << (tl.arange(0, C.BLOCK) % 8), (C.BLOCK // 8, 8))
    tl.store(flags + index * (C.BLOCK // 8) + tl.arange(0, C.BLOCK // 8), tl.sum(eights, 1).to(tl.uint8))
    worse = tl.sum(bad.to(tl.int64), 0)
    if worse > 0:
        tl.atomic_add(NONFINITE + bh, worse)


@triton.jit
def _sinks_of(K, V, sinks, k, v, arrivals, block, k_codec, v_codec, C: tl.constexpr):
    """The tokens `[BLOCK]` that the sink pool takes of the block that closes, with the new tokens `k` and `v` in it. It
    finds all in the ring; another program may write the values there too."""
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    row, pos, new, bh = block.row, arrivals.pos, arrivals.new, block.bh
    code, scale = k_codec.quantize_tokens(k)
    to_ring(K, code, scale, pos, new, bh, K_SIDE, C)
    code, scale = v_codec.quantize_tokens(v)
    to_ring(V, code, scale, pos, new, bh, V_SIDE, C)
    tl.debug_barrier()  # read back by other threads than wrote it
    t = tl.arange(0, C.BLOCK)
    at = row.open_start + t
    old = (at < row.length) & (slot_bits(block.flags, block.home.index * C.BLOCK + t) == 1)
    return compete(K, V, sinks, block.flags, old | (_among(at, pos, arrivals.bad) == 1), row, bh, C)


@triton.jit
def _early_token(source, b, h, NEW: tl.constexpr, ROTATES: tl.constexpr, C: tl.constexpr):
    """`new_tokens` of a step before its row is known; what has to be rotated as `load_new` reads it, since programs
    without the token would take as long over that as the one that has it."""
    only = tl.arange(0, NEW)
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    k = load_new(source.key, source.k_strides, b, h, only, only == 0, 0, K_SIDE)
    v = load_new(source.value, source.v_strides, b, h, only, only == 0, 0, V_SIDE)
    if ROTATES:
        return k, v, only < 0
    else:
        return checked_tokens(k, v, source, h, only == 0, C)


@triton.jit(do_not_specialize=["span_stride", "NB", "T", "parts"])
def short_kernel(SOURCE, SPANS, span_stride, STATE, BLOCKS, K, V, K_MEAN, SINKS, ROWS, PAGES, NB, QUERIES, T, parts,
                 K_CODEC, V_CODEC, NEW: tl.constexpr, EARLY: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Program (head, row, part of a block of the open span) of a call of at most `NEW` tokens; the decode commits the
    lengths. `parts`: of a block, 1, or 2 for keys and values in programs of their own: those of keys, which take
    longest, start first, and each multiprocessor gets as many of them.

    `SOURCE`, `STATE`, `BLOCKS`, `SINKS`, `K_CODEC`, `V_CODEC`: the fields of a `Source`, `RowState`, `BlockState`,
    `SinkTensors` and of two `Codec`. `SPANS`: the call's mask, the first real column of each row's new tokens and how
    many follow. The sink pool competes with the one block that a call closes, and notes for the decode what it moves
    (`sink_pool.kernel.moved_tokens`). `PAGES`: see `jit.rows.block_at`. `EARLY`: of one token, which every program
    loads at once. `QUERIES`: those of `T` tokens, as `rotate_queries` takes them; where keys are rotated the last
    program of a head and row writes them, which may have no block, else nobody reads it."""
    h, b, i = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    j, part = i // parts, i % parts
    source, blocks = Source(*SOURCE), BlockState(*BLOCKS)
    row = row_before(STATE, SPANS, span_stride, b, NB, C)
    longest = tl.load(RowState(*STATE).longest + b)
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    ROTATES: tl.constexpr = K_SIDE.ROTATION is not None or V_SIDE.ROTATION is not None
    if EARLY:  # the token comes while the row does, which says whether it is one
        early_k, early_v, bad = _early_token(source, b, h, NEW, ROTATES, C)
    length, closed, open_start, closing, first, count = row
    start, index, bh = open_start + j * C.BLOCK, closed + j, b * C.H + h
    used = (start < length + count) & (index < NB)  # never behind the arenas
    home = _home(PAGES, b, index, NB, C)
    flags = _flags(blocks.dropped, PAGES, b, h, index, home, NB, C)
    block = Block(b, h, bh, row, index, home, start, used, (j < closing) & used, flags)
    if part == 0:
        note_block(ROWS, SPANS, span_stride, blocks, block, j, C)
    if used & (block.closes | (start + C.BLOCK > length)):  # else nothing of it changes
        pos = tl.maximum(length, start) + tl.arange(0, NEW)
        new = pos < tl.minimum(length + count, start + C.BLOCK)
        if EARLY and ROTATES:
            k, v, bad = checked_tokens(early_k, early_v, source, h, new, C)
        elif EARLY:
            k, v, bad = early_k, early_v, bad & new
        else:
            k, v, bad = new_tokens(source, b, h, pos - length, new, first, C)
        if (part == 0) & (tl.max(bad.to(tl.int32), 0) > 0):
            t = tl.arange(0, C.BLOCK)
            gone = slot_bits(flags, home.index * C.BLOCK + t) | _among(start + t, pos, bad)
            tl.debug_barrier()  # every bit is read before a byte is written
            drop_bits(flags, blocks.nonfinite, gone, bad, home.index, bh, C)
        stale, arrivals, masks = length < longest, Arrivals(pos, new, bad), Masks(blocks.dropped, NB)
        chosen = tl.arange(0, C.BLOCK) < 0
        if C.ENTRIES > 0:
            if block.closes & (part == 0):
                chosen = _sinks_of(K, V, SinkTensors(*SINKS), k, v, arrivals, block, Codec(*K_CODEC), Codec(*V_CODEC),
                                   C)  # fmt: skip
        if part == 0:
            _short_side(K, K_MEAN, k, arrivals, stale, chosen, source, masks, block, Codec(*K_CODEC), K_SIDE, C)
        if part == parts - 1:
            _short_side(V, K_MEAN, v, arrivals, stale, chosen, source, masks, block, Codec(*V_CODEC), V_SIDE, C)
    if K_SIDE.ROTATION is not None:
        if i == tl.num_programs(2) - 1:
            rotate_queries(QUERIES, b, h, T, C)
