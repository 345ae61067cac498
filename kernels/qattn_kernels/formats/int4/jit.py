"""INT4 tokens with an INT8 ring in kernels. `formats/int4/reference.py` is the specification. Keys only."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.formats.int8.jit import quantize
from qattn_kernels.formats.int8_ring.jit import JIT as INT8_RING
from qattn_kernels.formats.packing import code_scores, read_codes, write_codes
from qattn_kernels.jit.math import code_bits
from qattn_kernels.jit.rows import block_of
from qattn_kernels.jit.tile_order import to_token_order

LEVELS = tl.constexpr(7)
OFFSET = tl.constexpr(8)  # added to a packed code, which is unsigned


@triton.jit
def quantize_tokens(x):
    return quantize(x, LEVELS)


@triton.jit
def put(S, tokens, slot, SIDE: tl.constexpr, C: tl.constexpr):
    at = block_of(slot, C)
    write_codes(S.codes, code_bits(tokens.code + OFFSET), at, 4, False, SIDE, C)
    tl.store(S.scale + at * C.BLOCK + tokens.t, tokens.scale)


@triton.jit
def get(S, slot, SIDE: tl.constexpr, C: tl.constexpr):
    at = block_of(slot, C)
    code = read_codes(S.codes, at, 4, False, SIDE, C) - OFFSET
    return code.to(tl.int8), tl.load(S.scale + at * C.BLOCK + tl.arange(0, C.BLOCK))


@triton.jit
def scores(S, at, query, SIDE: tl.constexpr, C: tl.constexpr):
    """Multiply queries with a block of keys. The code offset is subtracted as `OFFSET` times the sum of the query."""
    offset = tl.sum(query.normalized, 0) * OFFSET
    scale = to_token_order(tl.load(S.scale + at.block * C.BLOCK + tl.arange(0, C.BLOCK)), C.PARTS)
    return (
        (code_scores(S.codes, at.block, query.operand, 4, SIDE, C) - offset[None, :])
        * query.scale[None, :]
        * scale[:, None]
    )


JIT = INT8_RING._replace(quantize_tokens=quantize_tokens, put=put, get=get, scores=scores, splits_int8=True)
