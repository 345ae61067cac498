"""Remove the last tokens of every row: two launches, and a third with a sink pool (`sinks.py`).

`reference.py` is the specification.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from qattn_kernels.layout import RowState

BLOCKS = tl.constexpr(256)  # blocks of a row that a program handles at a time


@triton.jit
def _left(BLOCK_POS, BLOCK_LEN, at, inside, length):
    """Return how many tokens of a row of `length` each block has, and the row position where the block begins."""
    pos = tl.load(BLOCK_POS + at, mask=inside, other=0)
    return tl.minimum(tl.maximum(length - pos, 0), tl.load(BLOCK_LEN + at, mask=inside, other=0)), pos


@triton.jit
def _unset(TENSOR, b, NUMBERS: tl.constexpr):
    """Write zeros to the `NUMBERS` values of a row in a state tensor."""
    for first in range(0, NUMBERS, BLOCKS):
        i = first + tl.arange(0, BLOCKS)
        zeros = tl.zeros([BLOCKS], TENSOR.dtype.element_ty)
        tl.store(TENSOR + b.to(tl.int64) * NUMBERS + i, zeros, mask=i < NUMBERS)


class CropSizes(NamedTuple):
    """Constants of `crop_kernel`: a `layout.Window`, and `WINDOWED`, whether a ring holds tokens until their block
    closes."""

    BLOCK: int
    SPAN: int
    RESIDUAL: int
    HORIZON: int
    WINDOWED: bool


@triton.jit(do_not_specialize=["drop", "NB"])
def crop_kernel(STATE, ORIGIN, RING_FROM, BLOCK_POS, BLOCK_LEN, FIXED, drop, NB, NUMBERS: tl.constexpr,
                BY_TOKENS: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Shorten a row and its `NB` blocks by the last `drop` tokens. One program per row.

    Args:
        STATE: fields of a `RowState`. ORIGIN, RING_FROM, BLOCK_POS, BLOCK_LEN: state tensors of these names.
        FIXED: the state tensors that formats name as `fixed` (a row computes them once, from its first tokens), or
            None. The crop resets them if their tokens are gone.
        NUMBERS: values of a row in each tensor of `FIXED`. BY_TOKENS: whether a row's first tokens fix it, rather than
            its first closed block.
        C: the `CropSizes`.
    """
    b = tl.program_id(0)
    state = RowState(*STATE)
    longest, open_start, closed = tl.load(state.longest + b), tl.load(state.open_start + b), tl.load(state.closed + b)
    origin, ring_from = tl.load(ORIGIN + b), tl.load(RING_FROM + b)
    length = tl.maximum(tl.load(state.length + b) - drop, 0)
    reopened = origin + tl.maximum(length - origin - C.RESIDUAL, 0) // C.SPAN * C.SPAN
    near = (length >= longest - C.HORIZON) & (length >= origin) & (reopened >= ring_from)
    if not C.WINDOWED:
        near = length >= 0
    cut = (~near) & (length < open_start)
    start = tl.where(near, reopened, tl.where(cut, length, open_start))
    kept = closed - (open_start - start) // C.BLOCK
    i, at = tl.arange(0, BLOCKS), b.to(tl.int64) * NB
    if cut:
        kept = 0
        for first in range(0, NB, BLOCKS):
            left, _ = _left(BLOCK_POS, BLOCK_LEN, at + first + i, first + i < NB, length)
            kept += tl.sum((left > 0).to(tl.int32), 0)
    for first in range(0, NB, BLOCKS):
        here, inside = at + first + i, first + i < NB
        left, pos = _left(BLOCK_POS, BLOCK_LEN, here, inside, length)
        tl.store(BLOCK_LEN + here, tl.where(first + i < kept, left, 0), mask=inside)
        tl.store(BLOCK_POS + here, tl.where(first + i < kept, pos, 0), mask=inside)
    if cut:
        tl.store(ORIGIN + b, length)
        tl.store(state.longest + b, length)
        tl.store(RING_FROM + b, length)
    for i in tl.static_range(len(NUMBERS)):
        if length < C.BLOCK if BY_TOKENS[i] else kept == 0:
            _unset(FIXED[i], b, NUMBERS[i])
    tl.store(state.length + b, length)
    tl.store(state.open_start + b, start)
    tl.store(state.closed + b, kept)
    if b == 0:
        tl.store(state.columns_seen, tl.load(state.columns_seen) - drop)


@triton.jit(do_not_specialize=["H", "NB"])
def clear_kernel(STATE, BLOCK_LEN, DROPPED, H, NB, BLOCK: tl.constexpr, BYTES: tl.constexpr):
    """Clear the mask bits past a row's end, after `crop_kernel`. One program per (`BLOCKS` blocks, head, row).

    `BYTES`: a power of two, at least the bytes of a block's mask."""
    h, b = tl.program_id(1), tl.program_id(2)
    state = RowState(*STATE)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    n_open = tl.load(state.length + b) - tl.load(state.open_start + b)
    behind = block - tl.load(state.closed + b)  # 0 for the first open block, negative for packed ones
    closed = tl.load(BLOCK_LEN + b.to(tl.int64) * NB + block, mask=block < NB, other=0)
    left = tl.where(behind >= 0, tl.maximum(tl.minimum(n_open - behind * BLOCK, BLOCK), closed), closed)
    byte = tl.arange(0, BYTES)
    bits = tl.minimum(tl.maximum(left[:, None] - 8 * byte[None, :], 0), 8)
    at = ((b * H + h).to(tl.int64) * NB + block)[:, None] * (BLOCK // 8) + byte[None, :]
    inside = (block < NB)[:, None] & (byte < BLOCK // 8)[None, :]
    dropped = tl.load(DROPPED + at, mask=inside, other=0).to(tl.int32)
    tl.store(DROPPED + at, (dropped & ((1 << bits) - 1)).to(tl.uint8), mask=inside)
