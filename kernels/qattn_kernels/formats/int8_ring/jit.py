"""INT8 tokens with a ring in kernels. `formats/int8_ring/reference.py` is the specification. Keys only."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.contract import Tokens
from qattn_kernels.formats.int8.jit import JIT as INT8
from qattn_kernels.formats.int8.jit import put as put_tokens
from qattn_kernels.formats.int8.jit import token_scores


class Tensors(NamedTuple):
    """State tensors of one side, by their names in the state."""

    codes: Any
    scale: Any
    ring: Any
    ring_scale: Any


@triton.jit
def put(S, tokens, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Store a full block. Masked tokens are written as zeros, to overwrite older data in the block."""
    every = tokens.t >= 0
    put_tokens(S, Tokens(tokens.code, tokens.scale, tokens.keep, every, tokens.t), slot, SIDE, C)


@triton.jit
def ring_scores(S, tile, query, SIDE: tl.constexpr, C: tl.constexpr):
    at = tile.first + tile.start
    return token_scores(S.ring + at * SIDE.D, S.ring_scale + at, tile.TOKENS, 1, query, SIDE, C)


JIT = INT8._replace(Tensors=Tensors, put=put, ring_scores=ring_scores, values=None)
