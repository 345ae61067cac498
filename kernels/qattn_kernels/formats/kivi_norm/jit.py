"""KIVI's keys over their norms in kernels: `formats/kivi_norm/reference.py` is the specification. Keys only."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.kivi.jit import JIT as KIVI
from qattn_kernels.formats.kivi.jit import get as get_unit
from qattn_kernels.formats.kivi.jit import put as put_unit
from qattn_kernels.formats.kivi.jit import scores as unit_scores
from qattn_kernels.formats.scale_bits import from_bits, to_bits
from qattn_kernels.formats.turboquant.jit import tree_sum
from qattn_kernels.jit.math import divide
from qattn_kernels.jit.tile_order import to_token_order


class Tensors(NamedTuple):
    """The tensors of one side of a layer that the functions here take, by their names in its state."""

    codes: Any
    scale: Any
    zero_point: Any
    norm: Any
    compensation: Any
    ring: Any


@triton.jit
def put(S, code, scale, keep, write, t, b, h, index, NB, place, VALUES: tl.constexpr, C: tl.constexpr):
    """A full block, whose tokens come as they are."""
    squares = tl.reshape(tree_sum(tl.reshape(code * code, (code.shape[0], 1, code.shape[1]))), (code.shape[0],))
    bits = to_bits(tl.sqrt_rn(squares * (1.0 / C.D)))
    tl.store(S.norm + ((b * C.H + h).to(tl.int64) * NB + index) * C.BLOCK + t, bits)
    divisor = tl.where(bits == 0, 1.0, from_bits(bits))
    put_unit(S, divide(code, divisor[:, None]), scale, keep, write, t, b, h, index, NB, place, VALUES, C)


@triton.jit
def get(S, b, h, index, NB, place, VALUES: tl.constexpr, C: tl.constexpr):
    """Tokens `[BLOCK, DP]` of a closed block, dequantized; no scales."""
    x, scale = get_unit(S, b, h, index, NB, place, VALUES, C)
    at = ((b * C.H + h).to(tl.int64) * NB + index) * C.BLOCK + tl.arange(0, C.BLOCK)
    return x * from_bits(tl.load(S.norm + at))[:, None], scale


@triton.jit
def scores(S, at, index, query, query_scale, BITS: tl.constexpr, C: tl.constexpr):
    """Products with keys of norm 1, times their norms."""
    norm = from_bits(tl.load(S.norm + at * C.BLOCK + tl.arange(0, C.BLOCK)))
    return unit_scores(S, at, index, query, query_scale, BITS, C) * to_token_order(norm, C.PARTS)[:, None]


JIT = KIVI._replace(Tensors=Tensors, put=put, get=get, scores=scores, values=None, ring_values=None)
