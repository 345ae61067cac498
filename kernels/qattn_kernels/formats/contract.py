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


class Slot(NamedTuple):
    """Where a block of a head lies.

    Attributes:
        b, h: row and KV head. In a pool of pages the only row.
        index: of the block among the `capacity` that a head has room for.
        place: the head's among the heads of its side, as `JitFormat.place` and `locate` say.
    """

    b: Any
    h: Any
    index: Any
    capacity: Any
    place: Any


class Tokens(NamedTuple):
    """Tokens of a block on their way into the arenas.

    Attributes:
        code: fp32 `[n, DP]`, codes, or numbers of a format whose tokens have none. scale: fp32 `[n]`.
        keep: `[n]`, those by which scales that tokens share are made. write: `[n]`, those that are written.
        t: `[n]`, their places in the block.
    """

    code: Any
    scale: Any
    keep: Any
    write: Any
    t: Any


class BlockAt(NamedTuple):
    """Where a decode finds one side of a block.

    Attributes:
        block: its index among the blocks of all heads. codes: among those whose codes have `BITS`.
            Of a tile of `C.TILE` blocks: a tuple of the indices, and a tensor of them, of values a tensor twice.
        BITS: of a code.
    """

    block: Any
    codes: Any
    BITS: Any


class RingTile(NamedTuple):
    """`TOKENS` neighbours from `start` on of a ring of `SLOTS`, which begins at slot `first` of all heads' rings. As a
    `BlockAt` made in the call that takes it: a variable inside a kernel can hold no constants."""

    first: Any
    start: Any
    SLOTS: Any
    TOKENS: Any


class JitFormat(NamedTuple):
    """Triton functions of a format. One that differs from another in some is made by that one's `_replace`.

    `S` is a `Tensors`, `SIDE` the `formats.side.Side` and `C` the `launch.constants.Sizes` of the layer.

    Attributes:
        Tensors: named tuple of one side's state tensors, which the functions take as `S`. A format with a ring has
            `ring` among them, and `ring_scale` if that holds INT8.
        quantize_tokens: `(x)`: codes and scales of new tokens.
        block_form: `(code, scale, keep)`: those of a full block as its codes will say them, by the scale of the tokens
            to keep; for a prefill also of an unfinished block, where open tokens have no codes but the unpacked keys
            and values are INT8.
        put: `(S, tokens, slot, SIDE, C)`: writes `Tokens` of a block into the arenas. A format with a ring gets full
            blocks and writes all of each; one without writes the tokens in `write`.
        get: `(S, slot, SIDE, C)`: a block, unpacked.
        scores: `(S, at, query, SIDE, C)`: product of queries (`ops.decode.queries.QueryTile`) with the block of keys at
            a `BlockAt`, whose tokens stand in `token_order`, since packed bytes hold several part tiles. Of a tile of
            blocks (`Side.MOST_TILE`) a tuple, the scores of each in the order of its tokens. None in a format of
            values alone.
        values: `(S, at, p, acc, alpha, beta, SIDE, C)`: the accumulator with a block of values, weighed by `p`, and the
            sum of the weights. Of a tile of blocks weights come as `join_blocks` orders them. None in a format of keys
            alone.
        ring_scores, ring_values: the two products over a `RingTile`, also of sinks, which stand as a ring of theirs
            would.
        place: `(S, b, h, first, SIDE, C)`: where the codes of a head go, decided when its row's first block closes.
            None: heads lie in their order.
        locate: `(S, b, h, SIDE, C)`: where they are: the head's place, its index among those of its width in all rows,
            and whether that is the lower width. None: heads lie in their order.
        run: `(S, home, capacity, I, SIDE)`: run `I` of the blocks of a head, whose codes have `SIDE.WIDTHS[I]` bits, by
            its `ops.decode.parts.Home`: its first block and its end, and the index that the row's first block has, or
            would have, among the blocks whose codes are as wide. None: all blocks have one width.
        head_numbers: `(format, heads)`: what `Tensors` has that is not of the state; None for what nobody reads.
        splits_int8: codes enter products of integers whatever `compute`; queries are INT8 pairs then, of both sides.
    """

    Tensors: type
    quantize_tokens: Any
    block_form: Any
    put: Any
    get: Any
    scores: Any | None
    values: Any | None
    ring_scores: Any | None = None
    ring_values: Any | None = None
    place: Any | None = None
    locate: Any | None = None
    run: Any | None = None
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
