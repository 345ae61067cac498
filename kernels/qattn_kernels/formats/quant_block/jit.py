"""llama.cpp's blocks of 32 channels in kernels. `formats/quant_block/reference.py` is the specification."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats.channel_block.jit import Tensors, block_scores, block_values, get_block, put_block, restored
from qattn_kernels.formats.codebook import half_offsets
from qattn_kernels.formats.model_ring.jit import JIT as MODEL_RING
from qattn_kernels.formats.scale_bits import to_bits
from qattn_kernels.jit.math import code_bits, divide
from qattn_kernels.jit.rows import block_of

UNIT_4 = tl.constexpr(1 / 16)  # see `half_offsets`
UNIT_8 = tl.constexpr(1.0)
LARGEST = tl.constexpr(65504.0)  # largest fp16 number


@triton.jit
def encode(x, SIDE: tl.constexpr):
    """Return `code_bits` of fp32 groups `[BLOCK, groups, GROUP]`, and stored scales. Needs `enable_fp_fusion=False`."""
    BITS: tl.constexpr = SIDE.BITS
    low, high = tl.min(x, 2), tl.max(x, 2)
    if BITS == 8:
        top = tl.maximum(high, -low)
        scale = to_bits(tl.div_rn(top, tl.full(top.shape, 127, tl.float32)))
    else:
        signed = tl.where(high > -low, high, low) * -0.125
        scale = tl.clamp(signed, -LARGEST, LARGEST).to(tl.float16)
    whole = restored(scale)[:, :, None]
    y = tl.where(whole == 0.0, 0.0, divide(x, tl.where(whole == 0.0, 1.0, whole)))
    if BITS == 8:
        return code_bits(tl.clamp(y, -127.0, 127.0)), scale
    else:
        return code_bits(tl.clamp(tl.floor(y + 8.5), 0.0, 15.0)), scale


@triton.jit
def levels(code, BITS: tl.constexpr):
    """Return int8 levels of codes, in units of `UNIT_8` or `UNIT_4`."""
    if BITS == 8:
        return code.to(tl.int8)
    else:
        return ((code - 8) * 16).to(tl.int8)


@triton.jit
def put(S, tokens, slot, SIDE: tl.constexpr, C: tl.constexpr):
    put_block(S, tokens.code, block_of(slot, C), encode, False, SIDE, C)


@triton.jit
def get(S, slot, SIDE: tl.constexpr, C: tl.constexpr):
    UNIT: tl.constexpr = UNIT_8 if SIDE.BITS == 8 else UNIT_4
    return get_block(S, block_of(slot, C), levels, UNIT, False, SIDE, C)


@triton.jit
def scores(S, at, query, SIDE: tl.constexpr, C: tl.constexpr):
    UNIT: tl.constexpr = UNIT_8 if at.BITS == 8 else UNIT_4
    return block_scores(S, at.block, query, half_offsets, UNIT, at.BITS, SIDE, C)


@triton.jit
def values(S, at, p, acc, alpha, beta, SIDE: tl.constexpr, C: tl.constexpr):
    UNIT: tl.constexpr = UNIT_8 if at.BITS == 8 else UNIT_4
    return block_values(S, at.block, p, acc, alpha, beta, half_offsets, UNIT, at.BITS, SIDE, C)


JIT = MODEL_RING._replace(Tensors=Tensors, put=put, get=get, scores=scores, values=values, splits_int8=True)
