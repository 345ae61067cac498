"""FP8 values with one scale per channel in kernels. `formats/fp8_channel/reference.py` is the specification.

Values only."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.fp8.jit import LARGEST, rounded, signed_divide, to_bytes
from qattn_kernels.formats.int8.jit import addresses, numbers
from qattn_kernels.formats.model_ring.jit import JIT as MODEL_RING
from qattn_kernels.jit.math import SMALLEST_NORMAL
from qattn_kernels.jit.rows import block_of
from qattn_kernels.jit.split_int8 import repeated_columns, unrepeated_columns
from qattn_kernels.jit.tile_order import deinterleave


class Tensors(NamedTuple):
    """State tensors of one side, by their names in the state."""

    codes: Any
    scale: Any
    ring: Any


@triton.jit
def put(S, tokens, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Quantize and store a full block of unquantized tokens; masked tokens are zeros."""
    at = block_of(slot, C)
    d = tl.arange(0, SIDE.DP)
    top = tl.max(tl.abs(tokens.code), 0)
    scale = tl.div_rn(top, tl.full(top.shape, LARGEST, tl.float32))
    scale = tl.where(scale < SMALLEST_NORMAL, 0.0, scale)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    x = rounded(tl.clamp(signed_divide(tokens.code, divisor[None, :]), -LARGEST, LARGEST))
    tl.store(addresses(S.codes, at, tokens.t, SIDE, C), to_bytes(x), mask=(d < SIDE.D)[None, :])
    tl.store(S.scale + at * SIDE.D + d, scale, mask=d < SIDE.D)


@triton.jit
def get(S, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Return dequantized tokens `[BLOCK, DP]` of a closed block; the returned scales are zeros and unused."""
    at = block_of(slot, C)
    t, d = tl.arange(0, C.BLOCK), tl.arange(0, SIDE.DP)
    x = numbers(tl.load(addresses(S.codes, at, t, SIDE, C), mask=(d < SIDE.D)[None, :], other=0), C).to(tl.float32)
    scale = tl.load(S.scale + at * SIDE.D + d, mask=d < SIDE.D, other=0.0)
    return x * scale[None, :], tl.full([C.BLOCK], 0, tl.float32)


@triton.jit
def values(S, at, p, acc, alpha, beta, SIDE: tl.constexpr, C: tl.constexpr):
    """Add a block of values. E4M3 numbers are exact in fp16; a channel's scale multiplies its sum."""
    t, d = tl.arange(0, C.BLOCK), tl.arange(0, SIDE.DP)
    codes = S.codes + at.block * (C.BLOCK * SIDE.D) + d[:, None] * C.BLOCK + t[None, :]
    v = numbers(tl.load(codes, mask=(d < SIDE.D)[:, None], other=0), C).to(tl.float16)
    scale = tl.load(S.scale + at.block * SIDE.D + d, mask=d < SIDE.D, other=0.0)
    o = unrepeated_columns(tl.dot(v, repeated_columns(deinterleave(p, C.PARTS).to(tl.float16), C)), C)
    return acc * alpha[None, :] + o * scale[:, None] * beta[None, :], tl.sum(p, 0)


JIT = MODEL_RING._replace(Tensors=Tensors, put=put, get=get, values=values, scores=None, ring_scores=None)
