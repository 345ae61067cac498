"""The sinks of every row after tokens were taken back, in one launch; `ops/sink_pool/table.py` (`roll_back`) specifies
it."""

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
    """What the kernel is compiled for, by the names that `launch.constants.Sizes` has for it."""

    K: Side
    V: Side
    BLOCK: int
    ENTRIES: int


@triton.jit
def _put_bits(flags, slot, clear, put):
    """Bits of `dropped`: 0 where `clear` holds, then 1 where `put` does; entries may share a word, but no slot."""
    words, bits = flags.to(tl.pointer_type(tl.int32)) + slot // 32, tl.full(slot.shape, 1, tl.int32) << (slot % 32)
    tl.atomic_and(words, ~bits, mask=clear & (put == 0))
    tl.atomic_or(words, bits, mask=put)


@triton.jit(do_not_specialize=["NB"])
def sinks_kernel(STATE, TABLE, K_SINKS, V_SINKS, DROPPED, NB, C: tl.constexpr):
    """Program (head, row), after `crop_kernel` and `clear_kernel`: what reopened blocks did to the table is undone, and
    sinks that are no more go.

    Of a row that lost packed tokens beyond the horizon, survivors stay as they are. There alone a crop leaves no token
    between `longest` and the row's length.
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
