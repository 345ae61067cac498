"""What kernels know of each store: jit functions in a file named like the store, found by that name.

Every file offers the same functions; `S` is the tuple of one side's state tensors in the order of `TENSORS`, `low`
the number of 2-bit heads, `at` the block's index among all blocks of all heads, `place` where a head's codes live.

`open(x, ...)` codes and scales of new tokens; `put(...)` writes them into the arenas; `get(...)` a block in panel form;
`locate(...)` the place of a head; `scores(...)`, `values(...)` the two products of a decode step over one block, whose
tokens come as two half tiles, `[HALF, N]` each, because that is how packed bytes hold them. Queries are the columns:
with the tokens as rows a tensor core tile wastes 8 columns at most, where the other way round it wastes 16 rows.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from qattn_kernels.layout import State
from qattn_kernels.state import side_of
from qattn_kernels.stores import Store


def pieces_of(store: Store) -> ModuleType:
    """The jit functions of a store."""
    return importlib.import_module(f"qattn_kernels.pieces.{store.name}")


def side_tensors(state: State, side: str, store: Store) -> tuple:
    """The tensors of one side in the order in which its jit functions take them."""
    tensors = side_of(state, side)
    return tuple(tensors[name] for name in pieces_of(store).TENSORS)
