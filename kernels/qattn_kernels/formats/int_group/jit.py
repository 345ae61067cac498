"""INT8 and INT4 with shared token scales, in kernels. `formats/int_group/reference.py` is the specification."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.int4.jit import OFFSET
from qattn_kernels.formats.int8.jit import addresses, quantize_to, token_values
from qattn_kernels.formats.model_ring.jit import JIT as MODEL_RING
from qattn_kernels.formats.packing import code_scores, read_codes, write_codes
from qattn_kernels.jit.math import code_bits, float_to_int8
from qattn_kernels.jit.rows import block_of
from qattn_kernels.jit.split_int8 import dot_split, join_split
from qattn_kernels.jit.tile_order import token_order


class Tensors(NamedTuple):
    """State tensors of one side, by their names in the state."""

    codes: Any
    scale: Any
    ring: Any


@triton.jit
def shared(top, GROUP: tl.constexpr):
    """Return the largest `top` `[n]` of each token's group, see `granularity.key_groups`."""
    N: tl.constexpr = top.shape[0]
    if GROUP == "token":
        return top
    elif GROUP == "thread":
        most = tl.max(tl.max(tl.reshape(top, (N // 64, 8, 4, 2)), 3), 1)
        return tl.reshape(tl.broadcast_to(most[:, None, :, None], (N // 64, 8, 4, 2)), (N,))
    else:
        most = tl.max(tl.reshape(top, (N // 64, 64)), 1)
        return tl.reshape(tl.broadcast_to(most[:, None], (N // 64, 64)), (N,))


@triton.jit
def _groups(t, GROUP: tl.constexpr):
    if GROUP == "token":
        return t
    elif GROUP == "thread":
        return t // 64 * 4 + t % 8 // 2
    else:
        return t // 64


@triton.jit
def _scales(at, GROUP: tl.constexpr, C: tl.constexpr):
    """Return the offset of the scales of block `at`."""
    COUNT: tl.constexpr = C.BLOCK if GROUP == "token" else (C.BLOCK // 64 * 4 if GROUP == "thread" else C.BLOCK // 64)
    return at * COUNT


@triton.jit
def put(S, tokens, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Quantize and store a full block of unquantized tokens. Values have one scale per token."""
    BITS: tl.constexpr = SIDE.BITS
    GROUP: tl.constexpr = "token" if SIDE.VALUES else SIDE.GROUP
    at = block_of(slot, C)
    top = shared(tl.where(tokens.keep, tl.max(tl.abs(tokens.code), 1), 0.0), GROUP)
    coded, scale = quantize_to(tokens.code, top, 127 if BITS == 8 else 7)
    if BITS == 8:
        inside = tl.arange(0, SIDE.DP) < SIDE.D
        tl.store(addresses(S.codes, at, tokens.t, SIDE, C), float_to_int8(coded), mask=inside[None, :])
    else:
        write_codes(S.codes, code_bits(coded + OFFSET), at, 4, False, SIDE, C)
    tl.store(S.scale + _scales(at, GROUP, C) + _groups(tokens.t, GROUP), scale)  # all tokens of a group write the same


@triton.jit
def get(S, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Return dequantized tokens `[BLOCK, DP]` of a closed block; the returned scales are zeros and unused."""
    BITS: tl.constexpr = SIDE.BITS
    GROUP: tl.constexpr = "token" if SIDE.VALUES else SIDE.GROUP
    at = block_of(slot, C)
    t = tl.arange(0, C.BLOCK)
    if BITS == 8:
        inside = tl.arange(0, SIDE.DP) < SIDE.D
        code = tl.load(addresses(S.codes, at, t, SIDE, C), mask=inside[None, :], other=0).to(tl.float32)
    else:
        code = (read_codes(S.codes, at, 4, False, SIDE, C) - OFFSET).to(tl.float32)
    scale = tl.load(S.scale + _scales(at, GROUP, C) + _groups(t, GROUP))
    return code * scale[:, None], tl.full([C.BLOCK], 0, tl.float32)


@triton.jit
def scores(S, at, query, SIDE: tl.constexpr, C: tl.constexpr):
    t = token_order(C.BLOCK, C.PARTS)
    GROUP: tl.constexpr = SIDE.GROUP
    scale = tl.load(S.scale + _scales(at.block, GROUP, C) + _groups(t, GROUP))
    if at.BITS == 8:
        d = tl.arange(0, SIDE.DP)
        codes = S.codes + at.block * (C.BLOCK * SIDE.D) + t[:, None] * SIDE.D + d[None, :]
        s = join_split(dot_split(tl.load(codes, mask=(d < SIDE.D)[None, :], other=0), query.operand))
    else:  # subtract the code offset as OFFSET times the sum of the query
        s = code_scores(S.codes, at.block, query.operand, 4, SIDE, C) - (tl.sum(query.normalized, 0) * OFFSET)[None, :]
    return s * query.scale[None, :] * scale[:, None]


@triton.jit
def values(S, at, p, acc, alpha, beta, SIDE: tl.constexpr, C: tl.constexpr):
    """Add a block of 8-bit values with one scale per token."""
    codes, scales = S.codes + at.block * (C.BLOCK * SIDE.D), S.scale + at.block * C.BLOCK
    return token_values(codes, scales, C.BLOCK, C.BLOCK, C.PARTS, p, acc, alpha, beta, SIDE, C)


JIT = MODEL_RING._replace(Tensors=Tensors, put=put, get=get, scores=scores, values=values, splits_int8=True)
