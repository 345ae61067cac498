"""What kernels know of each store: jit functions in a file named like the store, found by that name.

Every file offers the same functions; `S` is the tuple of one side's state tensors in the order of `TENSORS`, `low`
the number of 2-bit heads, `at` the block's index among all blocks of all heads, `place` where a head's codes live.

`open(x)` codes and scales of new tokens; `seen(...)` those of a full block as its codes will say them; `place(...)`
where a head's codes go, decided when its row's first block closes, and `locate(...)` where they are; `put(...)` writes
codes into the arenas; `get(...)` a block in panel form; `scores(...)`, `values(...)` the two products of a decode step
over one block, whose tokens come as two half tiles, `[HALF, N]` each, because that is how packed bytes hold them.
Queries are the columns: with the tokens as rows a tensor core tile wastes 8 columns at most, where the other way round
it wastes 16 rows. A store with a ring has `head_of`, `ring` and `ring_scale` in places 2, 6 and 7 of `TENSORS`, where
the append and the decode find them.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from types import ModuleType

from qattn_kernels.layout import State
from qattn_kernels.stores import Store


@lru_cache(maxsize=1024)
def pieces_of(store: Store) -> ModuleType:
    """The jit functions of a store."""
    return importlib.import_module(f"qattn_kernels.pieces.{store.name}")


def side_tensors(state: State, side: str, store: Store) -> tuple:
    """The tensors of one side in the order in which its jit functions take them."""
    return tuple(state[f"{side}.{name}"] for name in pieces_of(store).TENSORS)
