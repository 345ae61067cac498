"""Append and close for long calls, in Triton. `reference.py` is the specification.

Runs before a prefill, which reads past and new tokens unpacked (`launch.unpacked_kv.UnpackedKV`). One program handles
one block of the open span, or two programs split its keys and values. See `kernel.py` for `S`, `C` and launch options.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.contract import Slot, Tokens
from qattn_kernels.jit.math import float_to_int8
from qattn_kernels.jit.rows import commit_rows, load_row, settle_sinks, slot_bits
from qattn_kernels.jit.tokens import Source, new_tokens, new_tokens_of, row_before, with_ring
from qattn_kernels.launch.unpacked_kv import UnpackedTensors
from qattn_kernels.layout import BlockState
from qattn_kernels.ops.append.kernel import Block, BlockHome, Codec, drop_bits, note_block, note_row, own_place, to_ring
from qattn_kernels.ops.append.smooth import minus_mean
from qattn_kernels.ops.prefill.value_factors import Factors, write_factors


class BlockTokens(NamedTuple):
    """Tokens of one block in a long call, `[BLOCK]`.

    Attributes:
        pos: row positions.
        slot: slots in the unpacked keys and values.
        old: whether the token was there before the call.
        keep: whether the token exists and is not masked.
    """

    pos: Any
    slot: Any
    old: Any
    keep: Any


class UnpackedSide(NamedTuple):
    """Pointers to unpacked keys or values `x` (codes or numbers), their scales, and the number of slots per head."""

    x: Any
    scale: Any
    slots: Any


class LongBlock(NamedTuple):
    """Inputs and outputs that one program of a long call shares between keys and values.

    Attributes:
        source: the `Source` of the new tokens.
        nonfinite: pointer to the counts of non-finite new tokens.
        unpacked: the `UnpackedTensors`.
        block: the `Block`.
        chosen: pointer to the bits of the tokens that the sink pool takes; None without a pool.
        k_mean: mean that the call subtracts from its keys (`k_mean.mean_kernel`).
    """

    source: Any
    nonfinite: Any
    unpacked: Any
    block: Any
    chosen: Any
    k_mean: Any


@triton.jit
def any_slots(slots, C: tl.constexpr):
    """Return bool `[BLOCK]`, true if unpacked keys and values have slots. A branch would cost registers."""
    return tl.full([C.BLOCK], True, tl.int1) & (slots > 0)


@triton.jit
def store_unpacked(side, x, scale, mean, bh, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Store tokens `[BLOCK, DP]` to consecutive slots: keys as `[slots, D]`, INT8 values as `[D, slots]`.

    Without INT8 storage, integer codes are dequantized and `mean` `[DP]` is added back, unless it is None. There may be
    zero slots."""
    d, slots = tl.arange(0, SIDE.DP), side.slots
    base, inside = side.x + bh.to(tl.int64) * slots * SIDE.D, d < SIDE.D
    if side.x.dtype.element_ty == tl.int8:
        if SIDE.VALUES:
            where = base + d[:, None].to(tl.int64) * slots + slot[None, :]
            tl.store(where, tl.trans(float_to_int8(x)), mask=inside[:, None])
        else:
            where = base + slot[:, None].to(tl.int64) * SIDE.D + d[None, :]
            tl.store(where, float_to_int8(x), mask=inside[None, :])
        tl.store(side.scale + bh.to(tl.int64) * slots + slot, scale)
    else:
        if SIDE.INTEGER:
            x = x.to(tl.float32) * scale[:, None]
        if mean is not None:
            x += mean[None, :]
        where = base + slot[:, None].to(tl.int64) * SIDE.D + d[None, :]
        tl.store(where, x.to(side.x.dtype.element_ty), mask=inside[None, :] & any_slots(slots, C)[:, None])


@triton.jit
def _long_side(S, x, tokens, unpacked, call, codec, OLD: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr):
    """Write keys or values of one block in a long call.

    Stores the block unpacked for the prefill. Packs it into the arenas if it closes, or if the format has no ring.
    `OLD`: the block may hold tokens from earlier calls, read from the ring."""
    block = call.block
    b, h, bh, index, capacity, keep = block.b, block.h, block.bh, block.index, block.home.capacity, tokens.keep
    t = tl.arange(0, C.BLOCK)
    code, scale = codec.quantize_tokens(x)
    around = None
    if C.RING > 0:
        if OLD:
            code, scale = with_ring(S, code, scale, tokens.pos, tokens.old, bh, SIDE, C)
        if SIDE.SMOOTH:
            d = tl.arange(0, SIDE.DP)
            mean = tl.load(call.k_mean + bh * SIDE.D + d, mask=d < SIDE.D, other=0.0)
            kept, kept_scale = codec.quantize_tokens(minus_mean(S, code, scale, keep, mean))
            kept, kept_scale = codec.block_form(kept, kept_scale, keep)
            if block.closes:
                slot = Slot(b, h, index, capacity, own_place(S, b, h, index == 0, codec, SIDE, C))
                codec.put(S, Tokens(kept, kept_scale, keep, keep, t), slot, SIDE, C)
            if SIDE.INTEGER:
                code, scale, around = kept, kept_scale, mean
        elif block.closes:
            slot = Slot(b, h, index, capacity, own_place(S, b, h, index == 0, codec, SIDE, C))
            if C.ENTRIES > 0 and not SIDE.VALUES:  # queries of this call read sinks inside their block
                keep = keep & (slot_bits(call.chosen, t) == 0)
                kept, kept_scale = codec.block_form(code, scale, keep)
                codec.put(S, Tokens(kept, kept_scale, keep, keep, t), slot, SIDE, C)
                code, scale = codec.block_form(code, scale, t >= 0)
            else:
                code, scale = codec.block_form(code, scale, keep)
                codec.put(S, Tokens(code, scale, keep, keep, t), slot, SIDE, C)
        elif SIDE.INTEGER and (S.ring.dtype.element_ty != tl.int8):
            code, scale = codec.block_form(code, scale, keep)  # open tokens have no codes: quantize as if it closed
    else:
        fresh = tl.full([C.BLOCK], True, tl.int1)  # a constant keeps stores of many tokens at once vectorized
        if OLD:
            fresh = ~tokens.old
        if block.used:
            codec.put(S, Tokens(code, scale, keep, fresh, t), Slot(b, h, index, capacity, h), SIDE, C)
        code, scale = codec.block_form(code, scale, keep)
        if OLD:
            before, before_scale = codec.get(S, Slot(b, h, tl.minimum(index, capacity - 1), capacity, h), SIDE, C)
            code = tl.where(tokens.old[:, None], before.to(tl.float32), code)
            scale = tl.where(tokens.old, before_scale, scale)
    store_unpacked(unpacked, code, scale, around, bh, tokens.slot, SIDE, C)


@triton.jit
def _long_tokens(bad, old, new, call, WRITES: tl.constexpr, C: tl.constexpr):
    """Return the `BlockTokens` of a long call. With `WRITES`, also store their mask bits, bias and positions."""
    block, unpacked, slots = call.block, call.unpacked, call.unpacked.slots
    index, bh, t = block.index, block.bh, tl.arange(0, C.BLOCK)
    pos, slot = block.start + t, index * C.BLOCK + t
    # bits of old tokens do not change, so one program may read them while another writes the byte
    gone = tl.where(old, slot_bits(block.flags, tl.where(old, slot, 0)), bad.to(tl.int32))
    keep = (old | new) & (gone == 0)
    if WRITES:
        if block.used:
            tl.debug_barrier()  # read every bit before writing any byte
            drop_bits(block.flags, call.nonfinite, gone, bad, index, bh, C)
        there = any_slots(slots, C)
        tl.store(unpacked.bias + bh.to(tl.int64) * slots + slot, tl.where(keep, 0.0, float("-inf")), mask=there)
        if block.h == 0:
            tl.store(unpacked.pos + block.b.to(tl.int64) * slots + slot, pos, mask=there)
    return BlockTokens(pos, slot, old, keep)


@triton.jit
def _long_part(S, call, old, new, side, codec, SIDE: tl.constexpr, C: tl.constexpr):
    """Write only the keys or only the values of one block."""
    block = call.block
    fresh = block.start + tl.arange(0, C.BLOCK) - block.row.length
    x, bad = new_tokens_of(call.source, block.b, block.h, fresh, new, block.row.first, SIDE, C)
    tokens = _long_tokens(bad, old, new, call, not SIDE.VALUES, C)
    if block.start < block.row.length:
        _long_side(S, x, tokens, side, call, codec, True, SIDE, C)
    else:
        _long_side(S, x, tokens, side, call, codec, False, SIDE, C)


@triton.jit
def _long_block(K, V, call, part, k_codec, v_codec, PARTS: tl.constexpr, C: tl.constexpr):
    """Write one block of a long call, or only its keys (`part` 0) or values (`part` 1) with `PARTS` 2."""
    block, unpacked = call.block, call.unpacked
    length, pos = block.row.length, block.start + tl.arange(0, C.BLOCK)
    old = pos < length
    new = (~old) & (pos < length + block.row.count)
    k_side = UnpackedSide(unpacked.k, unpacked.k_scale, unpacked.slots)
    v_side = UnpackedSide(unpacked.v, unpacked.v_scale, unpacked.slots)
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    # Only the call's first block holds older tokens. The ring loads in another thread layout than new tokens. Merging
    # both converts the values' layout before their maxima, which doubles the cost of every block.
    if PARTS == 1:
        k, v, bad = new_tokens(call.source, block.b, block.h, pos - length, new, block.row.first, C)
        tokens = _long_tokens(bad, old, new, call, True, C)
        if block.start < length:
            _long_side(K, k, tokens, k_side, call, k_codec, True, K_SIDE, C)
            _long_side(V, v, tokens, v_side, call, v_codec, True, V_SIDE, C)
        else:
            _long_side(K, k, tokens, k_side, call, k_codec, False, K_SIDE, C)
            _long_side(V, v, tokens, v_side, call, v_codec, False, V_SIDE, C)
    elif part == 0:
        _long_part(K, call, old, new, k_side, k_codec, K_SIDE, C)
    else:
        _long_part(V, call, old, new, v_side, v_codec, V_SIDE, C)


@triton.jit(do_not_specialize=["span_stride", "NB", "open_blocks"])
def long_kernel(SOURCE, SPANS, span_stride, LAYER, K_MEAN, UNPACKED, ROWS, NB, open_blocks, K_CODEC, V_CODEC,
                PARTS: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Append the tokens of a long call and pack full blocks.

    One program per (part of a block of the open span, head, row). Every program fills all its slots of `UNPACKED`, also
    after the row's end. `finish_kernel` writes the ring later, when every program has read it.

    Args:
        K_MEAN: fp32 `[B, H, D]`, mean key that the call subtracts.
        UNPACKED: fields of an `UnpackedTensors`, ignored when `slots` is 0.
        open_blocks: blocks of the open span for which the sink pool chose tokens.
        PARTS: programs per block: 1, or 2 to split keys from values.
        SOURCE, SPANS, LAYER, ROWS: as in `kernel.short_kernel`.
    """
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    j, part = i // PARTS, i % PARTS
    blocks, row = BlockState(*LAYER.blocks), row_before(LAYER, SPANS, span_stride, b, NB, C)
    length, closed, open_start, closing, first, count = row
    index, bh, start = closed + j, b * C.H + h, open_start + j * C.BLOCK
    used = (start < length + count) & (index < NB)
    flags, chosen = blocks.dropped + bh.to(tl.int64) * NB * (C.BLOCK // 8), None
    if C.ENTRIES > 0:
        chosen = LAYER.sinks.chosen + (bh.to(tl.int64) * open_blocks + j) * (C.BLOCK // 8)
    block = Block(b, h, bh, row, index, BlockHome(b, index, NB), start, used, (j < closing) & used, flags)
    if part == 0:
        if (h == 0) & (j == 0):
            note_row(ROWS, SPANS, span_stride, row, b)
        note_block(blocks, block, C)
    call = LongBlock(Source(*SOURCE), blocks.nonfinite, UnpackedTensors(*UNPACKED), block, chosen, K_MEAN)
    _long_block(LAYER.k, LAYER.v, call, part, Codec(*K_CODEC), Codec(*V_CODEC), PARTS, C)


@triton.jit(do_not_specialize=["NB", "B", "T"])
def finish_kernel(SOURCE, ROWS, LAYER, FACTORS, NB, B, T, slots, K_QUANTIZE: tl.constexpr, V_QUANTIZE: tl.constexpr,
                  STEP: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Finish a long call after its tokens are written. One program per (tile of the ring, head, row).

    Every program writes the newest tokens of its ring tile. One program per head settles the sinks, and one computes
    the `FACTORS` of the values' `slots` (`ops.prefill.value_factors`). One program commits the lengths."""
    i, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = load_row(ROWS, b)
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    if C.RING > 0:
        last = row.length + row.count - 1
        at = i * C.BLOCK + tl.arange(0, C.BLOCK)
        pos = last - (last - at + C.RING) % C.RING
        new = (at < C.RING) & (pos >= row.length)
        k, v, bad = new_tokens(Source(*SOURCE), b, h, pos - row.length, new, row.first, C)
        k_code, k_scale = K_QUANTIZE(k)
        v_code, v_scale = V_QUANTIZE(v)
        to_ring(LAYER.k, k_code, k_scale, pos, new, b * C.H + h, K_SIDE, C)
        to_ring(LAYER.v, v_code, v_scale, pos, new, b * C.H + h, V_SIDE, C)
    if FACTORS is not None:
        if i == tl.num_programs(0) - 1:
            write_factors(Factors(*FACTORS), row, b * C.H + h, slots, C.BLOCK, STEP)
    if C.ENTRIES > 0:
        if i == 0:
            settle_sinks(LAYER, row, b, h, NB, C)
    if (i == 0) & (h == 0) & (b == 0):
        commit_rows(ROWS, LAYER, B, T, C)
