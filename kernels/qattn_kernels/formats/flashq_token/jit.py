"""FlashQ with one scale per token in kernels. `formats/flashq_token/reference.py` is the specification. Values only."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats.flashq.jit import JIT as FLASHQ
from qattn_kernels.formats.flashq.jit import get_codes
from qattn_kernels.formats.flashq.second_stage import close_codes, codes_of, put_codes, ring_scales
from qattn_kernels.formats.packing import code_values
from qattn_kernels.formats.scale_bits import from_bits, to_bits
from qattn_kernels.jit.math import TINY, inverse_of
from qattn_kernels.jit.rows import block_of
from qattn_kernels.jit.split_int8 import SPLIT_TOP
from qattn_kernels.jit.tile_order import to_token_order


@triton.jit
def block_form(code, scale, keep):
    """Return the tokens' codes unchanged, and their scales rounded to 16 bits. This format has no first stage."""
    return code, from_bits(to_bits(scale))


@triton.jit
def put(S, tokens, slot, SIDE: tl.constexpr, C: tl.constexpr):
    put_codes(S, tokens.code, tokens.keep, slot, SIDE, C)
    tl.store(S.scale + block_of(slot, C) * C.BLOCK + tokens.t, to_bits(tokens.scale))


@triton.jit
def close(S, start, keep, slot, bh, END, SIDE: tl.constexpr, C: tl.constexpr):
    """Pack a block as `formats.flashq.second_stage.close`. The tokens' codes are this format's `X1`."""
    scale = ring_scales(S, start, bh, C)
    close_codes(S, start, keep, tl.zeros_like(scale) + 1.0, slot, bh, END, SIDE, C)
    tl.store(S.scale + block_of(slot, C) * C.BLOCK + tl.arange(0, C.BLOCK), to_bits(scale))


@triton.jit
def get(S, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Return INT8 tokens `[BLOCK, DP]` of a closed block, and their scales."""
    at = block_of(slot, C) * C.BLOCK + tl.arange(0, C.BLOCK)
    return get_codes(S, slot, SIDE, C), from_bits(tl.load(S.scale + at))


@triton.jit
def values(S, at, p, acc, alpha, beta, SIDE: tl.constexpr, C: tl.constexpr):
    """Add a block of values, as `formats.contract.JitFormat.values`.

    A token's scale multiplies its weight, and the channel scales multiply the sum. The sum of the scaled weights
    multiplies the zero points. 8-bit codes have neither channel scales nor zero points."""
    d = tl.arange(0, SIDE.DP)
    scale = from_bits(tl.load(S.scale + at.block * C.BLOCK + tl.arange(0, C.BLOCK)))
    w = p * to_token_order(scale, C.PARTS)[:, None]
    top = tl.maximum(tl.max(w, 0), TINY)
    o = code_values(codes_of(S, at.BITS), at.codes, w * (inverse_of(top) * SPLIT_TOP)[None, :], at.BITS, SIDE, C)
    if at.BITS == 8:
        o *= (top * (1.0 / 127.0))[None, :]
    else:
        channel_scale = tl.load(S.channel_scale + at.block * SIDE.D + d, mask=d < SIDE.D, other=0).to(tl.float32)
        zero_point = tl.load(S.zero_point + at.block * SIDE.D + d, mask=d < SIDE.D, other=0).to(tl.float32)
        o = o * channel_scale[:, None] * (top * (1.0 / 127.0))[None, :] + tl.sum(w, 0)[None, :] * zero_point[:, None]
    return acc * alpha[None, :] + o * beta[None, :], tl.sum(p, 0)


JIT = FLASHQ._replace(
    block_form=block_form, put=put, close=close, get=get, values=values, scores=None, ring_scores=None
)
