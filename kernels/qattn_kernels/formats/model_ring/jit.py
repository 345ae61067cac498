"""Model precision behind a ring in kernels: `formats/model_ring/reference.py` is the specification.

Others use the ring too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.model.jit import JIT as MODEL
from qattn_kernels.formats.model.jit import put as put_tokens
from qattn_kernels.formats.model.jit import token_scores, token_values


class Tensors(NamedTuple):
    """The tensors of one side of a layer that the functions here take, by their names in its state."""

    x: Any
    ring: Any


@triton.jit
def put(S, code, scale, keep, write, t, b, h, index, NB, place, VALUES: tl.constexpr, C: tl.constexpr):
    """A full block, its masked tokens included: they are zeros, and nothing else may be left of what lay there."""
    put_tokens(S, code, scale, keep, t >= 0, t, b, h, index, NB, place, VALUES, C)


@triton.jit
def ring_scores(S, at, TOKENS: tl.constexpr, query, query_scale, C: tl.constexpr):
    return token_scores(S.ring + at * C.D, TOKENS, 1, query, query_scale, C)


@triton.jit
def ring_values(S, first, start, SLOTS: tl.constexpr, TOKENS: tl.constexpr, p, acc, alpha, beta, C: tl.constexpr):
    return token_values(S.ring + (first + start) * C.D, TOKENS, 1, p, acc, alpha, beta, C)


JIT = MODEL._replace(Tensors=Tensors, put=put, ring_scores=ring_scores, ring_values=ring_values)
