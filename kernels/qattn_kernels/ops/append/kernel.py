"""Append and close for short calls, in Triton. `reference.py` is the specification; `long_call.py` has the long calls.

A short call has at most 32 new tokens, and a decode follows it. The open span of a row is its open tokens (in the ring,
not yet packed) and then its new tokens, cut into blocks. One program handles one block of the open span, of one row and
KV head. Keys and values can also get separate programs.

A program first writes the new tokens of its block to the ring. If the block closes in this call, the program reads it
back, quantizes it as a whole and writes the codes to the arenas. A format without a ring (`C.RING == 0`) writes the
codes of each token as it arrives.

`S` holds the tensors of one side (keys or values), `SIDE` its constants; `C` is a `launch.constants.Sizes`.

Launch every kernel in this file with `enable_fp_fusion=False`. A multiply fused into a rounding would produce codes
that differ from the reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.contract import Slot, Tokens
from qattn_kernels.jit.dependent import await_previous_kernel
from qattn_kernels.jit.rows import OVERFLOW, ROW_FIELDS, bits_at, block_at, first_bits, slot_bits, store_row
from qattn_kernels.jit.tokens import Source, checked_tokens, from_ring, load_new, new_tokens, ring_codes, row_before
from qattn_kernels.layout import BlockState, RowState
from qattn_kernels.ops.append.ranking import Masks, ranked_place
from qattn_kernels.ops.append.smooth import dequantize, mean_key, minus_mean
from qattn_kernels.ops.rotate.kernel import rotate_queries
from qattn_kernels.ops.sink_pool.kernel import compete


class Codec(NamedTuple):
    """Functions of one format; `formats.contract.JitFormat` documents each.

    Build the tuple inside the call that takes it: a variable inside a kernel cannot hold functions."""

    quantize_tokens: Any
    block_form: Any
    place: Any
    put: Any
    close: Any
    get: Any


class Block(NamedTuple):
    """One block of the open span, as seen by the program that writes it.

    Attributes:
        b, h, bh: row, KV head, and both as one index.
        row: the `layout.Row`.
        index: index of the block within its row.
        home: the `BlockHome` of its codes.
        start: row position of its first token.
        used: whether the block holds a token of the row.
        closes: whether this call packs the block.
        flags: base pointer of mask bits; the bits of this block are at slot `home.index * BLOCK` (`slot_bits`).
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


class BlockHome(NamedTuple):
    """Location of a block: number `index` of row `b`, with `capacity` blocks per head. In a page pool, `index` is a
    page and `b` is 0."""

    b: Any
    index: Any
    capacity: Any


@triton.jit
def to_ring(S, code, scale, pos, write, bh, SIDE: tl.constexpr, C: tl.constexpr):
    """Write open tokens to the ring slots of their row positions `pos`, where `write` is true."""
    inside = write[:, None] & (tl.arange(0, SIDE.DP) < SIDE.D)[None, :]
    tl.store(ring_codes(S, pos % C.RING, C.RING, bh, SIDE), code.to(S.ring.dtype.element_ty), mask=inside)
    if S.ring.dtype.element_ty == tl.int8:
        tl.store(S.ring_scale + bh.to(tl.int64) * C.RING + pos % C.RING, scale, mask=write)


@triton.jit
def _row_mean(S, K_MEAN, block, C: tl.constexpr):
    """Return the mean key, fp32 `[DP]`, that a closing block of a short call subtracts. The row's first block sets the
    mean."""
    SIDE: tl.constexpr = C.K
    d, bh = tl.arange(0, SIDE.DP), block.bh
    if block.row.closed == 0:
        t = tl.arange(0, C.BLOCK)
        code, scale = from_ring(S, block.start - block.index * C.BLOCK + t, t >= 0, bh, SIDE, C)
        first = (block.home.index - block.index) * C.BLOCK  # the row's first block; in a page pool only it closes here
        mean = mean_key(dequantize(S, code, scale), slot_bits(block.flags, first + t) == 0, True)  # block is full
        if block.index == 0:
            tl.store(K_MEAN + bh * SIDE.D + d, mean, mask=d < SIDE.D)
    else:
        mean = tl.load(K_MEAN + bh * SIDE.D + d, mask=d < SIDE.D, other=0.0)
    return mean


@triton.jit
def _bad_at(at, fresh, bad):
    """Return int32 `[BLOCK]`: 1 where the token at row position `at` is new and not finite, so that it is masked.

    Bit `i` of `bad` tells it of the token at `fresh + i`. Another program may not have written the mask bit yet."""
    i = at - fresh
    return tl.where((i >= 0) & (i < 32), bad >> tl.minimum(tl.maximum(i, 0), 31), 0) & 1


@triton.jit
def own_place(S, b, h, first, codec, SIDE: tl.constexpr, C: tl.constexpr):
    """Return the place of head `h`'s codes (`formats.contract.Slot.place`), without ranking.

    `first`: the block is the row's first one. A format that stores places writes them then."""
    if codec.place is None:
        return h
    else:
        return codec.place(S, b, h, first, SIDE, C)


@triton.jit
def _place(S, source, masks, block, codec, SIDE: tl.constexpr, C: tl.constexpr):
    """Return the place of the head's codes (`formats.contract.Slot.place`). Formats that rank heads decide it when the
    row's first block closes."""
    b, h, row = block.b, block.h, block.row
    place = own_place(S, b, h, block.index == 0, codec, SIDE, C)
    if SIDE.RANK >= 0:
        if row.closed == 0:
            place = ranked_place(S, source, masks, row, b, h, codec.quantize_tokens, codec.block_form, SIDE, C)
    return place


@triton.jit(noinline=True)
def _clear_after(S, last, block, PUT: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Overwrite the tokens of a block after row position `last` with zeros. Not inlined, because few steps do it."""
    home, t = block.home, tl.arange(0, C.BLOCK)
    empty, old = tl.full([C.BLOCK, SIDE.DP], 0.0, tl.float32), block.start + t > last
    slot = Slot(home.b, block.h, home.index, home.capacity, block.h)
    PUT(S, Tokens(empty, tl.max(empty, 1), old, old, t), slot, SIDE, C)


@triton.jit
def _put_tokens(S, x, arrivals, stale, block, codec, SIDE: tl.constexpr, C: tl.constexpr):
    """Write the `Arrivals` of a block to the ring, or to the arenas if the format has no ring.

    `x`: fp32 `[NEW, DP]`, their keys or values. `stale`: a crop left old tokens after the row's end; without a ring
    they are overwritten with zeros."""
    home, pos, new = block.home, arrivals.pos, arrivals.new
    code, scale = codec.quantize_tokens(x)
    if C.RING == 0:
        slot = Slot(home.b, block.h, home.index, home.capacity, block.h)
        codec.put(S, Tokens(code, scale, new, new, pos - block.start), slot, SIDE, C)
        if stale:
            _clear_after(S, tl.max(tl.where(new, pos, 0), 0), block, codec.put, SIDE, C)
    else:
        to_ring(S, code, scale, pos, new, block.bh, SIDE, C)


@triton.jit
def _close_side(S, K_MEAN, masked, chosen, source, masks, block, codec, SIDE: tl.constexpr, C: tl.constexpr):
    """Quantize a closing block of one side from the ring, and write its codes to the arenas.

    `masked`: int32 `[BLOCK]`, 1 for masked tokens. `chosen`: bool `[BLOCK]`, tokens that the sink pool takes."""
    h, bh, home, t = block.h, block.bh, block.home, tl.arange(0, C.BLOCK)
    place = _place(S, source, masks, block, codec, SIDE, C)
    slot, keep = Slot(home.b, h, home.index, home.capacity, place), masked == 0
    if C.ENTRIES > 0 and not SIDE.VALUES:  # sinks stay in the values' scales: see `ops/sink_pool/reference.py`
        keep = keep & ~chosen
    if codec.close is not None and not SIDE.SMOOTH:
        codec.close(S, block.start, keep, slot, bh, tl.minimum(masks.blocks, 1) * SIDE.D, SIDE, C)
    else:
        full, full_scale = from_ring(S, block.start + t, t >= 0, bh, SIDE, C)
        if SIDE.SMOOTH:
            mean = _row_mean(S, K_MEAN, block, C)
            full, full_scale = codec.quantize_tokens(minus_mean(S, full, full_scale, keep, mean))
        full, full_scale = codec.block_form(full, full_scale, keep)
        codec.put(S, Tokens(full, full_scale, keep, keep, t), slot, SIDE, C)


@triton.jit(noinline=True)
def _close(LAYER, fresh, bad, source, block, NB, part, parts, K_CODEC: tl.constexpr, V_CODEC: tl.constexpr,
           C: tl.constexpr):  # fmt: skip
    """Pack a block that is full: its part of keys, values or both. The ring must hold all its tokens.

    `fresh`, `bad`: see `_bad_at`. Not inlined, because few steps close a block: the code of the other steps then stays
    short. With a sink pool and 64 rows, these take 3.9 us on an H200 in place of 4.4."""
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    K, V, mean, t = LAYER.k, LAYER.v, LAYER.k_mean, tl.arange(0, C.BLOCK)
    masked = slot_bits(block.flags, block.home.index * C.BLOCK + t) | _bad_at(block.start + t, fresh, bad)
    chosen, masks = t < 0, Masks(BlockState(*LAYER.blocks).dropped, NB)
    if part == 0:
        if C.ENTRIES > 0:
            chosen = compete(K, V, LAYER.sinks, block.flags, masked == 1, block.row, block.bh, C)
        _close_side(K, mean, masked, chosen, source, masks, block, Codec(*K_CODEC), K_SIDE, C)
    if part == parts - 1:
        _close_side(V, mean, masked, chosen, source, masks, block, Codec(*V_CODEC), V_SIDE, C)


@triton.jit
def _home(PAGES, b, index, NB, C: tl.constexpr):
    """Return the `BlockHome` of block `index` of row `b`, whose capacity is `NB` blocks."""
    if C.PAGED:
        return BlockHome(0, block_at(PAGES, b, index, NB, C), PAGES[1])
    else:
        return BlockHome(b, index, NB)


@triton.jit
def _flags(DROPPED, PAGES, b, h, index, home, NB, C: tl.constexpr):
    """Return the base pointer for the mask bits of a row's block `index`, such that offsets count from `home.index`."""
    return first_bits(DROPPED, PAGES, b, h, NB, C) + (bits_at(home.index, index, C) - home.index) * (C.BLOCK // 8)


@triton.jit
def note_row(ROWS, SPANS, span_stride, row, b):
    """Store the `Row` for later kernels, followed by the count of tokens that do not fit. One program per row does."""
    store_row(ROWS, b, row)
    tl.store(ROWS + b * ROW_FIELDS + OVERFLOW, tl.load(SPANS + b * span_stride + 1) - row.count)


@triton.jit
def note_block(blocks, block, C: tl.constexpr):
    """Store the position and length of a block that closes, which all heads share: the program of head 0 does."""
    if block.closes & (block.h == 0):
        at = block.home.b * block.home.capacity + block.home.index
        tl.store(blocks.block_pos + at, block.start)
        tl.store(blocks.block_len + at, C.BLOCK)


@triton.jit
def drop_bits(flags, NONFINITE, gone, bad, index, bh, C: tl.constexpr):
    """Write the mask bits of block `index` from `gone` int32 `[BLOCK]`, 1 for masked tokens, and add the number of new
    non-finite tokens `bad` to the head's count in `NONFINITE`."""
    eights = tl.reshape(gone << (tl.arange(0, C.BLOCK) % 8), (C.BLOCK // 8, 8))
    tl.store(flags + index * (C.BLOCK // 8) + tl.arange(0, C.BLOCK // 8), tl.sum(eights, 1).to(tl.uint8))
    worse = tl.sum(bad.to(tl.int64), 0)
    if worse > 0:
        tl.atomic_add(NONFINITE + bh, worse)


@triton.jit
def early_token(LAYER, source, b, h, NEW: tl.constexpr, RAW: tl.constexpr, C: tl.constexpr):
    """Load the new token of a one-token step, and the row's `longest`, before the row is known.

    Returns keys, values and flags as `new_tokens` does, and `longest`. With `RAW` the token is not rotated or checked:
    both wait until the row is known, so that programs without the token do not pay for them."""
    only = tl.arange(0, NEW)
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    k = load_new(source.key, source.k_strides, b, h, only, only == 0, 0, K_SIDE)
    v = load_new(source.value, source.v_strides, b, h, only, only == 0, 0, V_SIDE)
    bad, longest = only < 0, tl.load(RowState(*LAYER.rows).longest + b)
    if not RAW:
        k, v, bad = checked_tokens(k, v, source, h, only == 0, C)
    return k, v, bad, longest


class Arrivals(NamedTuple):
    """New tokens that a short call adds to a block.

    Attributes:
        k, v: keys and values, fp32 `[NEW, DP]`.
        pos: row positions `[NEW]`, from `fresh` on.
        new: bool `[NEW]`, whether the token belongs to the block.
        bad: bool `[NEW]`, whether the key or the value is not finite. `bits` has them as an integer, for `_bad_at`.
        longest: as in `RowState`.
    """

    k: Any
    v: Any
    pos: Any
    fresh: Any
    new: Any
    bad: Any
    bits: Any
    longest: Any


@triton.jit
def _arrivals(LAYER, early, source, block, NEW: tl.constexpr, EARLY: tl.constexpr, RAW: tl.constexpr, C: tl.constexpr):
    """Return the `Arrivals` of a block. `early`: what `early_token` loaded, if `EARLY`."""
    row = block.row
    fresh = tl.maximum(row.length, block.start)
    pos = fresh + tl.arange(0, NEW)
    new = pos < tl.minimum(row.length + row.count, block.start + C.BLOCK)
    if EARLY:
        k, v, bad, longest = early[0], early[1], early[2] & new, early[3]
        if RAW:
            k, v, bad = checked_tokens(k, v, source, block.h, new, C)
    else:
        k, v, bad = new_tokens(source, block.b, block.h, pos - row.length, new, row.first, C)
        longest = tl.load(RowState(*LAYER.rows).longest + block.b)
    return Arrivals(k, v, pos, fresh, new, bad, tl.sum(bad.to(tl.int32) << tl.arange(0, NEW), 0), longest)


@triton.jit
def open_block(LAYER, row, b, h, j, NB, C: tl.constexpr):
    """Return block `j` of the open span of a row and head, as a `Block`."""
    start, index = row.open_start + j * C.BLOCK, row.closed + j
    used = (start < row.length + row.count) & (index < NB)  # stay inside the arenas
    home = _home(LAYER.pages, b, index, NB, C)
    flags = _flags(BlockState(*LAYER.blocks).dropped, LAYER.pages, b, h, index, home, NB, C)
    return Block(b, h, b * C.H + h, row, index, home, start, used, (j < row.closing) & used, flags)


@triton.jit
def _drop_broken(LAYER, tokens, block, C: tl.constexpr):
    """Mask the `Arrivals` of a block that are not finite."""
    t, blocks = tl.arange(0, C.BLOCK), BlockState(*LAYER.blocks)
    old = slot_bits(block.flags, block.home.index * C.BLOCK + t)
    gone = old | _bad_at(block.start + t, tokens.fresh, tokens.bits)
    tl.debug_barrier()  # read every bit before writing any byte
    drop_bits(block.flags, blocks.nonfinite, gone, tokens.bad, block.home.index, block.bh, C)


@triton.jit
def _write(LAYER, tokens, block, part, parts, K_CODEC: tl.constexpr, V_CODEC: tl.constexpr, C: tl.constexpr):
    """Write the `Arrivals` of a block: the part of keys, of values or both, and the mask bits."""
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    if part == 0:
        if tokens.bits != 0:
            _drop_broken(LAYER, tokens, block, C)
    stale = block.row.length < tokens.longest
    # the pool reads both sides of a closing block, new tokens included
    both = block.closes & (part == 0) if C.ENTRIES > 0 else part < 0
    if part == 0:
        _put_tokens(LAYER.k, tokens.k, tokens, stale, block, Codec(*K_CODEC), K_SIDE, C)
    if (part == parts - 1) | both:
        _put_tokens(LAYER.v, tokens.v, tokens, stale, block, Codec(*V_CODEC), V_SIDE, C)


@triton.jit
def append_token(LAYER, source, early, row, b, h, NB, K_CODEC: tl.constexpr, V_CODEC: tl.constexpr, C: tl.constexpr):
    """Write a row's new token, which `early_token` loaded raw, to the arenas of a format without a ring."""
    block = open_block(LAYER, row, b, h, 0, NB, C)
    note_block(BlockState(*LAYER.blocks), block, C)
    _write(LAYER, _arrivals(LAYER, early, source, block, 1, True, True, C), block, 0, 1, K_CODEC, V_CODEC, C)
    tl.debug_barrier()  # the threads that read the block are not those that wrote the token


@triton.jit(do_not_specialize=["span_stride", "NB", "T", "parts"])
def short_kernel(SOURCE, SPANS, span_stride, LAYER, ROWS, NB, QUERIES, T, parts, K_CODEC, V_CODEC, NEW: tl.constexpr,
                 EARLY: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Append up to `NEW` tokens and pack full blocks. One program per (head, row, part of a block of the open span).

    If a call of one token packs single blocks, the program of the token's block also packs the first block of the span.
    All programs read the row lengths, so the merge commits them. `SinkTensors.moved` tells which sinks moved.

    Args:
        SOURCE, K_CODEC, V_CODEC: fields of a `Source` and of two `Codec`.
        SPANS: int32 `[B or 1, 2]`, first real column and number of real tokens of each row, `span_stride` apart.
        LAYER: the `launch.call.LayerTensors`. ROWS: int32 `[B, ROW_FIELDS]`, receives each `Row` before the call.
        NB: capacity of a row in blocks. T: tokens of the call. NEW: a power of two, at least `T`.
        QUERIES: for `rotate_queries`, by the last program of a head and row; None if keys are not rotated.
        parts: programs per block: 1, or 2 to split keys from values. Key programs take longest, so they start first.
        EARLY: every program loads the call's one token together with its row, and learns later if it is its own.
    """
    await_previous_kernel(C.DEPENDENT)
    h, b, i = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    j, part = i // parts, i % parts
    source, row = Source(*SOURCE), row_before(LAYER, SPANS, span_stride, b, NB, C)
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    ROTATES: tl.constexpr = K_SIDE.ROTATION is not None or V_SIDE.ROTATION is not None
    APART: tl.constexpr = C.ONE_TOKEN and C.SPAN == C.BLOCK and C.RESIDUAL > 0  # the block that closes has no new token
    early = None
    if EARLY:  # a load after the row would make every step wait twice
        early = early_token(LAYER, source, b, h, NEW, ROTATES, C)
    if APART:  # a program that only rotates queries has no block
        j = tl.where(i < parts, (row.length - row.open_start) // C.BLOCK, NB)
    block = open_block(LAYER, row, b, h, j, NB, C)
    closing = block
    if APART:
        closing = open_block(LAYER, row, b, h, 0, NB, C)
    if part == 0:
        if (h == 0) & (i == 0):
            note_row(ROWS, SPANS, span_stride, row, b)
        note_block(BlockState(*LAYER.blocks), closing, C)
    # a block of old tokens that stays open does not change
    if block.used & (block.closes | (block.start + C.BLOCK > row.length)):
        tokens = _arrivals(LAYER, early, source, block, NEW, EARLY, ROTATES, C)
        _write(LAYER, tokens, block, part, parts, K_CODEC, V_CODEC, C)
        if C.RING > 0:
            if closing.closes:
                tl.debug_barrier()  # the threads that read the block are not those that wrote its last tokens
                _close(LAYER, tokens.fresh, tokens.bits, source, closing, NB, part, parts, K_CODEC, V_CODEC, C)
    if K_SIDE.ROTATION is not None:
        if i == tl.num_programs(2) - 1:
            rotate_queries(QUERIES, b, h, T, C)
