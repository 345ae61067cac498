"""What kernels know of each format: jit functions in a file named like the format, found by that name.

Every file offers the same functions, and `Tensors`, the state of one side by name, which they take as `S`. `LOW` says
which heads have 2 bits (`flashq.reference.Low`), `at` is the block's index among all blocks of all heads, `index` that
among the blocks of heads of its width, `place` where a head's codes live.

`open(x)` codes and scales of new tokens; `seen(...)` those of a full block as its codes will say them, by the scale of
the tokens to `keep`, for a prefill also of an unfinished one where open tokens have none but the panel is INT8;
`place(...)` where a head's codes go, decided when its row's first block closes, and `locate(...)` where they are, and
whether in 2 bits; `head_numbers(...)`, if there, what `Tensors` has that is not of the state; `put(...)` writes codes
into the arenas; `get(...)` a block in panel form; `scores(...)`, `values(...)` the two products of a decode step over
one block of `BITS`-bit codes, whose tokens stand in `token_order` since packed bytes hold several part tiles;
`channels(C)` the channels of the rows of what `values` sums.

Queries are the columns: with the tokens as rows a tensor core tile wastes 8 columns at most, where the other way round
it wastes 16 rows.

A format with a ring has `ring` among its tensors, and `ring_scale` if that holds INT8, and offers `ring_scores(...)`,
`ring_values(...)`: the two products over the ring, or over sinks, which stand as a ring of theirs would. A format of
keys or of values alone offers the products of its side. `SPLITS_INT8`: its codes enter products of integers whatever
`compute`; then queries have INT8 pairs for both sides.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

from qattn_kernels.formats import Format
from qattn_kernels.layout import State


@lru_cache(maxsize=1024)
def jit_of(fmt: Format) -> ModuleType:
    """The jit functions of a format; keys around a mean are those of the format that holds their codes."""
    return importlib.import_module(f"qattn_kernels.formats.{fmt.core.name}.jit")


def side_tensors(state: State, side: str, fmt: Format, heads: int) -> tuple:
    """The tensors of one side as its jit functions take them."""
    pieces = jit_of(fmt)
    numbers = pieces.head_numbers(fmt.core, heads) if hasattr(pieces, "head_numbers") else {}
    found = {name: state[f"{side}.{name}"] for name in pieces.Tensors._fields if name not in numbers}
    return pieces.Tensors(**found, **numbers)


class Sinks(NamedTuple):
    """The sinks of one side, under the names of a ring; `ring_scale` is another tensor where they have none."""

    ring: Any
    ring_scale: Any


def sink_tensors(state: State, side: str) -> Sinks:
    """The sinks of one side as a format's functions for the ring take them."""
    return Sinks(state[f"{side}.sink"], state.get(f"{side}.sink_scale", state["sink.norm"]))
