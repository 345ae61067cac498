"""FlashQ in kernels: `stores/flashq.py` is the specification. `LOW` is the number of 2-bit heads."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.jit import join_twins, round_even, twin
from qattn_kernels.pieces.int8 import quantize

TENSORS = ("codes4", "codes2", "head_of", "s2", "z2", "s", "ring", "ring_scale")
LEVELS = tl.constexpr(119)


@triton.jit
def open(x):
    return quantize(x, LEVELS)


@triton.jit
def locate(S, b, h, LOW: tl.constexpr, C: tl.constexpr):
    """The place of head `h` in the arenas, 4-bit places first, and its index among those of its width."""
    place = h
    if (LOW > 0) and (LOW < C.H):
        n = tl.arange(0, triton.next_power_of_2(C.H))
        there = tl.load(S[2] + b * C.H + n, mask=n < C.H, other=-1)
        place = tl.sum(tl.where(there == h, n, 0), 0)
    wide = b * (C.H - LOW) + place
    narrow = b * LOW + place - (C.H - LOW)
    return place, tl.where(place < C.H - LOW, wide, narrow).to(tl.int64)


@triton.jit
def seen(code, scale):
    """A full block: token-scaled codes to one scale, integers in fp32."""
    s = tl.max(scale, 0)
    ratio = tl.div_rn(scale, tl.zeros_like(scale) + tl.where(s == 0.0, 1.0, s))
    return round_even(code * ratio[:, None]), tl.zeros_like(scale) + s


@triton.jit
def place(S, b, h, first, VALUES: tl.constexpr, C: tl.constexpr):
    """Where head `h` lives; noted when the row's `first` block closes, unless the ranking kernel did."""
    LOW: tl.constexpr = C.V_LOW if VALUES else C.K_LOW
    MASK: tl.constexpr = C.V_MASK if VALUES else C.K_MASK
    if MASK < 0:
        found, _ = locate(S, b, h, LOW, C)
    else:
        n = tl.arange(0, triton.next_power_of_2(C.H))
        low, own = (MASK >> n.to(tl.int64)) & 1, (MASK >> h.to(tl.int64)) & 1
        before = (n < C.H) & ((low < own) | ((low == own) & (n < h)))
        found = tl.sum(before.to(tl.int32), 0)
        if first:
            tl.store(S[2] + b * C.H + found, h)
    return found


@triton.jit
def _write_codes(codes, x1, zero, step, at, BITS: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr):
    PARTS: tl.constexpr = 8 // BITS
    ROWS: tl.constexpr = C.BLOCK // PARTS
    code = round_even(tl.div_rn(x1 - zero[None, :], tl.broadcast_to(step[None, :], x1.shape)))
    code = tl.clamp(code, 0.0, 2.0**BITS - 1).to(tl.int32)
    parts = tl.reshape(code, (PARTS, ROWS, C.DP)) << (tl.arange(0, PARTS) * BITS)[:, None, None]
    packed = tl.sum(parts, 0).to(tl.uint8)  # the parts share no bit, so their sum is their union
    t, d = tl.arange(0, ROWS), tl.arange(0, C.DP)
    if VALUES:
        where = codes + at * (ROWS * C.D) + d[None, :] * ROWS + t[:, None]
    else:
        where = codes + at * (ROWS * C.D) + t[:, None] * C.D + d[None, :]
    tl.store(where, packed, mask=(d < C.D)[None, :])


@triton.jit
def put(S, code, scale, keep, write, t, b, h, index, NB, place, VALUES: tl.constexpr, C: tl.constexpr):
    """Stage two: a full block in 4 or 2 bits a channel, in integers."""
    LOW: tl.constexpr = C.V_LOW if VALUES else C.K_LOW
    d = tl.arange(0, C.DP)
    levels = tl.where(place >= C.H - LOW, 3, 15)
    some = tl.max(keep.to(tl.int32), 0) > 0
    low = tl.where(some, tl.min(tl.where(keep[:, None], code, 127.0), 0), 0.0).to(tl.int32)
    high = tl.where(some, tl.max(tl.where(keep[:, None], code, -127.0), 0), 0.0).to(tl.int32)
    step = tl.maximum((2 * (high - low) + levels) // (2 * levels), 1)
    zero = low + ((high - low - step * levels) >> 1)
    at = (b * C.H + h).to(tl.int64) * NB + index
    tl.store(S[3] + at * C.D + d, step.to(tl.int8), mask=d < C.D)
    tl.store(S[4] + at * C.D + d, zero.to(tl.int8), mask=d < C.D)
    tl.store(S[5] + at, tl.max(scale, 0))
    zero, step = zero.to(tl.float32), step.to(tl.float32)
    if LOW < C.H:
        if place < C.H - LOW:
            at4 = (b * (C.H - LOW) + place).to(tl.int64) * NB + index
            _write_codes(S[0], code, zero, step, at4, 4, VALUES, C)
    if LOW > 0:
        if place >= C.H - LOW:
            at2 = (b * LOW + place - (C.H - LOW)).to(tl.int64) * NB + index
            _write_codes(S[1], code, zero, step, at2, 2, VALUES, C)


@triton.jit
def _read_codes(codes, at, BITS: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr):
    ROWS: tl.constexpr = C.BLOCK * BITS // 8
    t, d = tl.arange(0, C.BLOCK), tl.arange(0, C.DP)
    byte, shift = t % ROWS, (t // ROWS) * BITS
    if VALUES:
        where = codes + at * (ROWS * C.D) + d[None, :] * ROWS + byte[:, None]
    else:
        where = codes + at * (ROWS * C.D) + byte[:, None] * C.D + d[None, :]
    return (tl.load(where, mask=(d < C.D)[None, :], other=0).to(tl.int32) >> shift[:, None]) & (2**BITS - 1)


@triton.jit
def get(S, b, h, index, NB, place, VALUES: tl.constexpr, C: tl.constexpr):
    """Stage two undone: INT8 tokens `[BLOCK, DP]` of a closed block, and the block's scale for each."""
    LOW: tl.constexpr = C.V_LOW if VALUES else C.K_LOW
    d = tl.arange(0, C.DP)
    at = (b * C.H + h).to(tl.int64) * NB + index
    step = tl.load(S[3] + at * C.D + d, mask=d < C.D, other=0).to(tl.int32)
    zero = tl.load(S[4] + at * C.D + d, mask=d < C.D, other=0).to(tl.int32)
    code = tl.full([C.BLOCK, C.DP], 0, tl.int32)
    if LOW < C.H:
        if place < C.H - LOW:
            code = _read_codes(S[0], (b * (C.H - LOW) + place).to(tl.int64) * NB + index, 4, VALUES, C)
    if LOW > 0:
        if place >= C.H - LOW:
            code = _read_codes(S[1], (b * LOW + place - (C.H - LOW)).to(tl.int64) * NB + index, 2, VALUES, C)
    x1 = code * step[None, :] + zero[None, :]
    return x1.to(tl.int8), tl.load(S[5] + at) + tl.full([C.BLOCK], 0, tl.float32)


@triton.jit
def _nibbles(x, HIGH: tl.constexpr, PLAIN: tl.constexpr):
    """Four bytes at a time: one half tile of a packed tile."""
    if PLAIN:
        return ((x >> (4 * HIGH)) & 15).to(tl.int8)
    if HIGH:
        asm: tl.constexpr = "{.reg .b32 t; shr.b32 t, $1, 4; and.b32 $0, t, 0x0f0f0f0f;}"
    else:
        asm: tl.constexpr = "and.b32 $0, $1, 0x0f0f0f0f;"
    return tl.inline_asm_elementwise(asm, "=r,r", [x], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def _crumbs(x, second, HIGH: tl.constexpr, PLAIN: tl.constexpr):
    """The same for 2 bits: `x` holds each byte twice, `second` (-1 or 0) says where its upper pair is meant."""
    if PLAIN:
        return ((x >> (4 * HIGH + 2 * (second & 1).to(tl.uint8))) & 3).to(tl.int8)
    if HIGH:
        asm: tl.constexpr = "{.reg .b32 a, b; shr.b32 a, $1, 4; shr.b32 b, $1, 6; lop3.b32 a, $2, b, a, 0xca; and.b32 $0, a, 0x03030303;}"  # noqa: E501
    else:
        asm: tl.constexpr = "{.reg .b32 a, b; shr.b32 b, $1, 2; lop3.b32 a, $2, b, $1, 0xca; and.b32 $0, a, 0x03030303;}"  # noqa: E501 # fmt: skip
    return tl.inline_asm_elementwise(asm, "=r,r,r", [x, second], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def _half_tiles(codes, at, BITS: tl.constexpr, VALUES: tl.constexpr, C: tl.constexpr):
    """Codes of the two halves of a block, `[HALF, DP]` of keys, `[DP, HALF]` of values."""
    HALF: tl.constexpr = C.BLOCK // 2
    ROWS: tl.constexpr = C.BLOCK * BITS // 8
    t, d = tl.arange(0, HALF), tl.arange(0, C.DP)
    if VALUES:
        where = codes + at * (ROWS * C.D) + d[:, None] * ROWS + (t % ROWS)[None, :]
        x = tl.load(where, mask=(d < C.D)[:, None], other=0)
    else:
        where = codes + at * (ROWS * C.D) + (t % ROWS)[:, None] * C.D + d[None, :]
        x = tl.load(where, mask=(d < C.D)[None, :], other=0)
    if BITS == 4:
        return _nibbles(x, 0, C.PLAIN), _nibbles(x, 1, C.PLAIN)
    else:
        second = tl.where(t >= ROWS, -1, 0).to(tl.int8)
        second = tl.broadcast_to(second[None, :] if VALUES else second[:, None], x.shape)
        return _crumbs(x, second, 0, C.PLAIN), _crumbs(x, second, 1, C.PLAIN)


@triton.jit
def _codes(S, place_at, place, VALUES: tl.constexpr, C: tl.constexpr):
    """Both halves of the block of a head, whose width is known to the compiler or told by its place."""
    LOW: tl.constexpr = C.V_LOW if VALUES else C.K_LOW
    if LOW == 0:
        lo, hi = _half_tiles(S[0], place_at, 4, VALUES, C)
    elif LOW == C.H:
        lo, hi = _half_tiles(S[1], place_at, 2, VALUES, C)
    else:
        if place < C.H - LOW:
            lo, hi = _half_tiles(S[0], place_at, 4, VALUES, C)
        else:
            lo, hi = _half_tiles(S[1], place_at, 2, VALUES, C)
    return lo, hi


@triton.jit
def scores(S, at, place_at, place, query, query_scale, C: tl.constexpr):
    """INT8: the keys' channel scales go into the query, so that codes enter the product as they are."""
    d = tl.arange(0, C.DP)
    step = tl.load(S[3] + at * C.D + d, mask=d < C.D, other=0).to(tl.float32)
    zero = tl.load(S[4] + at * C.D + d, mask=d < C.D, other=0).to(tl.float32)
    s = tl.load(S[5] + at)
    lo, hi = _codes(S, place_at, place, False, C)
    if C.INT8:
        q = query[1]
        x = q * step[:, None]
        top = tl.max(tl.abs(x), 0) + 1e-30
        x8 = twin(x * (127.0 / top)[None, :])
        off = (tl.sum(q * zero[:, None], 0) * s)[None, :]
        up = (top * (s * (1.0 / 127.0)))[None, :]
        s_lo = join_twins(tl.dot(lo, x8, out_dtype=tl.int32)) * up + off
        s_hi = join_twins(tl.dot(hi, x8, out_dtype=tl.int32)) * up + off
    else:  # undone codes are integers below 2^8, exact in every floating format
        q = query[0]
        x_lo = (lo.to(tl.float32) * step[None, :] + zero[None, :]).to(q.dtype)
        x_hi = (hi.to(tl.float32) * step[None, :] + zero[None, :]).to(q.dtype)
        s_lo = tl.dot(x_lo, q, input_precision="ieee") * (s * query_scale)
        s_hi = tl.dot(x_hi, q, input_precision="ieee") * (s * query_scale)
    return s_lo, s_hi


@triton.jit
def values(S, at, place_at, place, p_lo, p_hi, acc, alpha, beta, dtype: tl.constexpr, C: tl.constexpr):
    """Values' channel scales go into the sum, and a zero point is weighed with the sum of the weights."""
    d = tl.arange(0, C.DP)
    lo, hi = _codes(S, place_at, place, True, C)
    step = tl.load(S[3] + at * C.D + d, mask=d < C.D, other=0).to(tl.float32)
    zero = tl.load(S[4] + at * C.D + d, mask=d < C.D, other=0).to(tl.float32)
    s = tl.load(S[5] + at)
    if C.INT8:  # twins leave so little of the weights that their own sum serves as well as that of rounded ones
        o = tl.dot(lo, twin(p_lo * 127.0), out_dtype=tl.int32)
        o = join_twins(tl.dot(hi, twin(p_hi * 127.0), acc=o, out_dtype=tl.int32)) * (step * (1.0 / 127.0))[:, None]
        total = tl.sum(p_lo + p_hi, 0)
    else:
        r_lo, r_hi = p_lo.to(dtype), p_hi.to(dtype)
        o = tl.dot(lo.to(dtype), r_lo, input_precision="ieee")
        o = tl.dot(hi.to(dtype), r_hi, acc=o, input_precision="ieee") * step[:, None]
        total = tl.sum(r_lo.to(tl.float32) + r_hi.to(tl.float32), 0)
    return acc * alpha[None, :] + (o + total[None, :] * zero[:, None]) * (beta * s)[None, :], total
