"""Update the sinks of every row after a crop, in one launch. `roll_back` in `ops/sink_pool/table.py` specifies it."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.side import Side
from qattn_kernels.jit.rows import FOREVER
from qattn_kernels.launch.call import Table
from qattn_kernels.layout import RowState
from qattn_kernels.ops.sink_pool.kernel import fill, load_table, store_table


class PoolSizes(NamedTuple):
    """Constants of the kernel. The names are those in `launch.constants.Sizes`."""

    K: Side
    V: Side
    BLOCK: int
    ENTRIES: int


@triton.jit
def _put_bits(flags, slot, clear, put):
    """Clear the bits of `dropped` where `clear` holds, then set them where `put` holds.

    Entries may share a word, but not a slot."""
    words, bits = flags.to(tl.pointer_type(tl.int32)) + slot // 32, tl.full(slot.shape, 1, tl.int32) << (slot % 32)
    tl.atomic_and(words, ~bits, mask=clear & (put == 0))
    tl.atomic_or(words, bits, mask=put)


@triton.jit(do_not_specialize=["NB"])
def sinks_kernel(STATE, TABLE, K_SINKS, V_SINKS, DROPPED, NB, C: tl.constexpr):
    """Remove the sinks of removed tokens, and undo the changes that reopened blocks made to the table.

    Runs after `crop_kernel` and `clear_kernel`, one program per (head, row).

    A row that lost packed tokens beyond the horizon keeps its remaining sinks unchanged. The kernel recognizes such a
    row by `longest`, which equals its length only after a crop of this kind.
    """
    h, b = tl.program_id(0), tl.program_id(1)
    bh, state = b * tl.num_programs(0) + h, RowState(*STATE)
    length, closed = tl.load(state.length + b), tl.load(state.closed + b)
    cut = tl.load(state.longest + b) == length
    at = bh.to(tl.int64) * C.ENTRIES + tl.arange(0, C.ENTRIES)
    pos, slot, born, evicted, written, norm = load_table(TABLE, at)
    before = (born > 0) & (written == 0)
    gone = (pos >= length) | (born > tl.where(cut, FOREVER, closed))
    latest = tl.where(cut, closed, 0)
    born = tl.where(gone, 0, tl.where(born > closed, latest, born))
    evicted = tl.where(gone, 0, tl.where(evicted > closed, latest, evicted))
    written = tl.where(gone, 0, tl.where(written > closed, latest, written))
    _put_bits(DROPPED + bh.to(tl.int64) * NB * (C.BLOCK // 8), slot, before, (born > 0) & (written == 0))
    pos, slot, norm = tl.where(gone, 0, pos), tl.where(gone, 0, slot), tl.where(gone, 0.0, norm)
    store_table(TABLE, at, Table(pos, slot, born, evicted, written, norm))
    scale = tl.full([C.ENTRIES], 0, tl.float32)
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    fill(K_SINKS, tl.full([C.ENTRIES, K_SIDE.DP], 0, tl.float32), scale, gone, bh, C.ENTRIES, K_SIDE)
    fill(V_SINKS, tl.full([C.ENTRIES, V_SIDE.DP], 0, tl.float32), scale, gone, bh, C.ENTRIES, V_SIDE)
