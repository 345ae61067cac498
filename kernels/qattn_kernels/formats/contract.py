"""Interface between kernels and formats: the object `JIT` of the module `jit` next to a format's class.

Queries are the columns of products. A tensor core tile then wastes at most 8 columns; with queries as rows it would
waste up to 16 rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from qattn_kernels.formats import Format, jit_module
from qattn_kernels.layout import State


class Slot(NamedTuple):
    """Location of a block of a head.

    Attributes:
        b, h: row and KV head; in a page pool, `b` is 0.
        index: index of the block among the head's `capacity` blocks.
        place: where the head's codes are among the heads of its side: with one width, `h`. Heads of 4 bits come before
            heads of 2 bits, so with both it is the head's rank in that order. From `JitFormat.place` or `locate`.
    """

    b: Any
    h: Any
    index: Any
    capacity: Any
    place: Any


class Tokens(NamedTuple):
    """Tokens of a block, ready to be written to the arenas.

    Attributes:
        code: fp32 `[n, DP]`, codes, or numbers if the format's tokens have no codes.
        scale: fp32 `[n]`.
        keep: bool `[n]`, tokens that count toward shared scales.
        write: bool `[n]`, tokens to write.
        t: `[n]`, their positions in the block.
    """

    code: Any
    scale: Any
    keep: Any
    write: Any
    t: Any


class BlockAt(NamedTuple):
    """Location of one side of a block in a decode.

    For a tile of `C.TILE` blocks, `block` is a tuple of indices and `codes` a tensor of them; for values both are
    tensors.

    Attributes:
        block: index among the blocks of all heads.
        codes: index among the blocks with `BITS` bits.
        BITS: bits per code.
    """

    block: Any
    codes: Any
    BITS: Any


class RingTile(NamedTuple):
    """`TOKENS` consecutive slots, from `start` on, of a ring with `SLOTS` slots.

    `first` is the ring's offset among the rings of all heads. Build the tuple inside the call that takes it, as a
    `BlockAt`: a variable inside a kernel cannot hold constants."""

    first: Any
    start: Any
    SLOTS: Any
    TOKENS: Any


class JitFormat(NamedTuple):
    """Triton functions of a format. Derive a similar format with `_replace`.

    `S` is a `Tensors`, `SIDE` the `formats.side.Side` and `C` the `launch.constants.Sizes` of the layer.

    Attributes:
        Tensors: named tuple of one side's state tensors, passed to the functions as `S`. A format with a ring includes
            `ring`, and `ring_scale` if the ring is INT8.
        quantize_tokens: `(x)`: returns codes and scales of new tokens.
        block_form: `(code, scale, keep)`: returns codes and scales of a full block as `get` would read it, with the
            scale of the tokens to keep. A prefill also calls it on an unfinished block, if open tokens have no codes
            but the unpacked keys and values are INT8.
        put: `(S, tokens, slot, SIDE, C)`: writes `Tokens` of a block to the arenas. A format with a ring gets full
            blocks and writes all tokens; one without writes the tokens in `write`.
        close: `(S, start, keep, slot, bh, END, SIDE, C)`: `block_form` and `put` of the full block whose tokens are in
            the ring from row position `start` on. A short call prefers it: less code to load in the steps that close a
            block. `END`: the number of channels. None: there is only `put`.
        get: `(S, slot, SIDE, C)`: returns an unpacked block.
        scores: `(S, at, query, SIDE, C)`: multiplies queries (`ops.decode.queries.QueryTile`) with the keys of a
            `BlockAt`. Tokens are in `token_order`, because packed bytes hold several part tiles. For a tile of blocks
            (`Side.MOST_TILE`) it returns a tuple, each block's scores in its token order. None for formats that store
            only values.
        values: `(S, at, p, acc, alpha, beta, SIDE, C)`: adds a block of values, weighted by `p`, and returns the
            accumulator and the sum of the weights. Weights for a tile of blocks are in the order of `join_blocks`. None
            for formats that store only keys.
        ring_scores, ring_values: the same two products over a `RingTile`. Sinks use them too, stored like a ring.
        place: `(S, b, h, first, SIDE, C)`: decides where a head's codes go, when the row's first block closes. None:
            heads are stored in order.
        locate: `(S, b, h, SIDE, C)`: returns the head's place, its index among heads of its width in all rows, and
            whether that width is the lower one. None: heads are stored in order.
        run: `(S, home, capacity, I, SIDE)`: returns run `I` of the blocks of a head at `home`
            (`ops.decode.parts.HeadHome`), with `SIDE.WIDTHS[I]` bits: its first block, its end, and the index of the
            row's first block among the blocks with these bits, even if that block has others. None: all blocks have
            one width.
        head_numbers: `(format, heads)`: values of `Tensors` that are not in the state; None for unused ones.
        splits_int8: integer products for every `compute`. Queries of both sides are then INT8 pairs.
        fuses: codes of `quantize_tokens` and `put` are the same with fused multiply-adds, because each product before
            an addition is exact. Without a ring, a decode then writes the token of a step.
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
    close: Any | None = None
    place: Any | None = None
    locate: Any | None = None
    run: Any | None = None
    head_numbers: Callable[[Any, int], dict[str, Any]] | None = None
    splits_int8: bool = False
    fuses: bool = False


@lru_cache(maxsize=1024)
def jit_of(fmt: Format) -> JitFormat:
    """Return the Triton functions of a format. A smoothed format uses the functions of its inner format."""
    return importlib.import_module(jit_module(fmt.core.name)).JIT


def side_tensors(state: State, side: str, fmt: Format, heads: int) -> tuple:
    """Return the tensors of one side in the form that its jit functions take; None for tensors without elements.

    Kernels wait for their arguments, so one less saves time."""
    jit = jit_of(fmt)
    numbers = {} if jit.head_numbers is None else jit.head_numbers(fmt.core, heads)
    fields = jit.Tensors._fields  # type: ignore[attr-defined]
    tensors = {name: state[f"{side}.{name}"] for name in fields if name not in numbers}
    return jit.Tensors(**{name: x if x.numel() else None for name, x in tensors.items()}, **numbers)


class Sinks(NamedTuple):
    """Sinks of one side, named like a ring. `ring_scale` is a placeholder for formats whose sinks have no scales."""

    ring: Any
    ring_scale: Any


def sink_tensors(state: State, side: str) -> Sinks:
    """Return the sinks of one side in the form that a format's ring functions take."""
    return Sinks(state[f"{side}.sink"], state.get(f"{side}.sink_scale", state["sink.norm"]))
