"""What kernels know of each format: the typed object `JIT` of `formats/NAME/jit.py`, found by the format's name.

Queries are the columns of products: with the tokens as rows a tensor core tile wastes 8 columns at most, where the
other way round it wastes 16 rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from qattn_kernels.formats.base import Format
from qattn_kernels.layout import State


class JitFormat(NamedTuple):
    """Triton functions of a format. One that differs from another in some is made by that one's `_replace`.

    `S` is a `Tensors`; `at` the block's index among all blocks of all heads, `index` that among the blocks of heads of
    its width, `place` where a head's codes live, `BITS` the bits of its codes. Where a decode reads `C.TILE` blocks at
    a time (`Format.tile_blocks`), `scores` takes the `ops.decode.parts.Places` of a tile for `at` and returns a tuple,
    the scores of each block in the order of its tokens; `values` takes a tensor of their indices, and weights as
    `join_blocks` orders them.

    Attributes:
        Tensors: named tuple of one side's state tensors, which the functions take as `S`. A format with a ring has
            `ring` among them, and `ring_scale` if that holds INT8.
        quantize_tokens: `(x)`: codes and scales of new tokens.
        block_form: `(code, scale, keep)`: those of a full block as its codes will say them, by the scale of the tokens
            to keep; for a prefill also of an unfinished block, where open tokens have no codes but the unpacked keys
            and values are INT8.
        place: where a head's codes go, decided when its row's first block closes.
        locate: where they are, and whether in 2 bits.
        put: `(S, code, scale, keep, write, t, ...)`: writes the codes of tokens `t` of a block into the arenas. Scales
            that they share are those of the tokens in `keep`. A format with a ring gets full blocks and writes all of
            each; one without writes the tokens in `write`.
        get: a block, unpacked.
        scores: product of queries (`ops.decode.queries.QueryTile`) with one block of keys, whose tokens stand in
            `token_order`, since packed bytes hold several part tiles; None in a format of values alone.
        values: the same of weights with one block of values; None in a format of keys alone.
        ring_scores, ring_values: the two products over the ring, or over sinks, which stand as a ring of theirs would.
        head_numbers: `(format, heads)`: what `Tensors` has that is not of the state; None for what nobody reads.
        splits_int8: codes enter products of integers whatever `compute`; queries are INT8 pairs then, of both sides.
    """

    Tensors: type
    quantize_tokens: Any
    block_form: Any
    place: Any
    locate: Any
    put: Any
    get: Any
    scores: Any | None
    values: Any | None
    ring_scores: Any | None = None
    ring_values: Any | None = None
    head_numbers: Callable[[Any, int], dict[str, Any]] | None = None
    splits_int8: bool = False


@lru_cache(maxsize=1024)
def jit_of(fmt: Format) -> JitFormat:
    """The Triton functions of a format; keys around a mean are those of the format that holds their codes."""
    return importlib.import_module(f"qattn_kernels.formats.{fmt.core.name}.jit").JIT


def side_tensors(state: State, side: str, fmt: Format, heads: int) -> tuple:
    """The tensors of one side as its jit functions take them."""
    jit = jit_of(fmt)
    numbers = {} if jit.head_numbers is None else jit.head_numbers(fmt.core, heads)
    fields = jit.Tensors._fields  # type: ignore[attr-defined]
    return jit.Tensors(**{name: state[f"{side}.{name}"] for name in fields if name not in numbers}, **numbers)


class Sinks(NamedTuple):
    """The sinks of one side, under the names of a ring; `ring_scale` is another tensor where they have none."""

    ring: Any
    ring_scale: Any


def sink_tensors(state: State, side: str) -> Sinks:
    """The sinks of one side as a format's functions for the ring take them."""
    return Sinks(state[f"{side}.sink"], state.get(f"{side}.sink_scale", state["sink.norm"]))
