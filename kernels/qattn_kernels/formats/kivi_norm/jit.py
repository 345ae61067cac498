"""KIVI's keys divided by their norms, in kernels. `formats/kivi_norm/reference.py` is the specification. Keys only."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.contract import Tokens
from qattn_kernels.formats.kivi.jit import JIT as KIVI
from qattn_kernels.formats.kivi.jit import get as get_unit
from qattn_kernels.formats.kivi.jit import put as put_unit
from qattn_kernels.formats.kivi.jit import scores as unit_scores
from qattn_kernels.formats.scale_bits import from_bits, to_bits
from qattn_kernels.formats.turboquant.jit import tree_sum
from qattn_kernels.jit.math import divide
from qattn_kernels.jit.rows import block_of
from qattn_kernels.jit.tile_order import to_token_order


class Tensors(NamedTuple):
    """State tensors of one side, by their names in the state."""

    codes: Any
    scale: Any
    zero_point: Any
    norm: Any
    compensation: Any
    ring: Any


@triton.jit
def put(S, tokens, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Quantize and store a full block of unquantized tokens."""
    squares = tl.reshape(
        tree_sum(tl.reshape(tokens.code * tokens.code, (tokens.code.shape[0], 1, tokens.code.shape[1]))),
        (tokens.code.shape[0],),
    )
    bits = to_bits(tl.sqrt_rn(squares * (1.0 / SIDE.D)))
    tl.store(S.norm + block_of(slot, C) * C.BLOCK + tokens.t, bits)
    divisor = tl.where(bits == 0, 1.0, from_bits(bits))
    unit = divide(tokens.code, divisor[:, None])
    put_unit(S, Tokens(unit, tokens.scale, tokens.keep, tokens.write, tokens.t), slot, SIDE, C)


@triton.jit
def get(S, slot, SIDE: tl.constexpr, C: tl.constexpr):
    """Return dequantized tokens `[BLOCK, DP]` of a closed block; the returned scales are zeros and unused."""
    x, scale = get_unit(S, slot, SIDE, C)
    at = block_of(slot, C) * C.BLOCK + tl.arange(0, C.BLOCK)
    return x * from_bits(tl.load(S.norm + at))[:, None], scale


@triton.jit
def scores(S, at, query, SIDE: tl.constexpr, C: tl.constexpr):
    """Multiply queries with unit-norm keys, then with the keys' norms."""
    norm = from_bits(tl.load(S.norm + at.block * C.BLOCK + tl.arange(0, C.BLOCK)))
    return unit_scores(S, at, query, SIDE, C) * to_token_order(norm, C.PARTS)[:, None]


JIT = KIVI._replace(Tensors=Tensors, put=put, get=get, scores=scores, values=None, ring_values=None)
