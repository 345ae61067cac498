"""Unquantized keys or values with a ring, in kernels. `formats/model_ring/reference.py` is the specification.

Other formats use its ring functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.contract import Tokens
from qattn_kernels.formats.model.jit import JIT as MODEL
from qattn_kernels.formats.model.jit import put as put_tokens
from qattn_kernels.formats.model.jit import token_scores, token_values


class Tensors(NamedTuple):
    """State tensors of one side, by their names in the state."""

    x: Any
    ring: Any


@triton.jit
def put(S, tokens, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Store a full block. Masked tokens are written as zeros, to overwrite older data in the block."""
    every = tokens.t >= 0
    put_tokens(S, Tokens(tokens.code, tokens.scale, tokens.keep, every, tokens.t), slot, SIDE, C)


@triton.jit
def ring_scores(S, tile, query, SIDE: tl.constexpr, C: tl.constexpr):
    return token_scores(S.ring + (tile.first + tile.start) * SIDE.D, tile.TOKENS, 1, query, SIDE, C)


@triton.jit
def ring_values(S, tile, p, acc, alpha, beta, SIDE: tl.constexpr, C: tl.constexpr):
    return token_values(S.ring + (tile.first + tile.start) * SIDE.D, tile.TOKENS, 1, p, acc, alpha, beta, SIDE, C)


JIT = MODEL._replace(Tensors=Tensors, put=put, ring_scores=ring_scores, ring_values=ring_values)
