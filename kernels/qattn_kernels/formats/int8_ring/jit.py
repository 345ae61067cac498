"""INT8 tokens behind a ring in kernels: `formats/int8_ring/reference.py` is the specification. Keys only."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.int8.jit import JIT as INT8
from qattn_kernels.formats.int8.jit import put as put_tokens
from qattn_kernels.formats.int8.jit import token_scores


class Tensors(NamedTuple):
    """The tensors of one side of a layer that the functions here take, by their names in its state."""

    codes: Any
    scale: Any
    ring: Any
    ring_scale: Any


@triton.jit
def put(S, code, scale, keep, write, t, b, h, index, NB, place, VALUES: tl.constexpr, C: tl.constexpr):
    """A full block, its masked tokens included: they are zeros, and nothing else may be left of what lay there."""
    put_tokens(S, code, scale, keep, t >= 0, t, b, h, index, NB, place, VALUES, C)


@triton.jit
def ring_scores(S, at, TOKENS: tl.constexpr, query, query_scale, C: tl.constexpr):
    return token_scores(S.ring + at * C.D, S.ring_scale + at, TOKENS, 1, query, query_scale, C)


JIT = INT8._replace(Tensors=Tensors, put=put, ring_scores=ring_scores, values=None)
