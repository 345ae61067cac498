"""Order of tokens in a tile of scores.

A packed byte holds codes of several parts of a block: with 4 bits its low half belongs to the first half of the tokens
and its high half to the second. `docs/kernels.md` shows the orders in a picture."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def stack(first, second):
    """Stack `[n, Q]` and `[n, Q]` to `[2 n, Q]` without moving data."""
    return tl.reshape(tl.permute(tl.join(first, second), (2, 0, 1)), (2 * first.shape[0], first.shape[1]))


@triton.jit
def unstack(x):
    """Return both halves of `[2 n, Q]`, the inverse of `stack`."""
    return tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))


@triton.jit
def split_columns(x):
    """Return both halves of the columns of `[n, m]`, `[n, m / 2]` each."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def part_order(n: tl.constexpr, PARTS: tl.constexpr):
    """Return the token of each row in a tile of `PARTS` consecutive parts.

    Rows of a part that are eight apart are neighbouring tokens, because one thread holds them (see `split_weights`)."""
    row, PART = tl.arange(0, n), n // PARTS
    return row // PART * PART + row % 8 * (PART // 8) + row % PART // 8


@triton.jit
def token_order(n: tl.constexpr, PARTS: tl.constexpr):
    """Return the token of each row in a tile whose `PARTS` parts are interleaved, eight rows each.

    A thread then holds rows in the order of its accumulator rows. In any other order the compiler would compute the
    softmax twice, once for the tile and once for the accumulator."""
    row = tl.arange(0, n)
    return row // 8 % PARTS * (n // PARTS) + row % 8 * (n // (8 * PARTS)) + row // (8 * PARTS)


@triton.jit
def to_part_order(x, PARTS: tl.constexpr):
    """Reorder numbers `[n]` of a block's tokens, such as scales, from ascending order to `part_order`.

    In ascending order they load as whole words, ahead of their use."""
    return tl.reshape(tl.permute(tl.reshape(x, (PARTS, 8, x.shape[0] // (8 * PARTS))), (0, 2, 1)), (x.shape[0],))


@triton.jit
def to_token_order(x, PARTS: tl.constexpr):
    """Reorder numbers `[n]` of a block's tokens from ascending order to `token_order`; see `to_part_order`."""
    return tl.reshape(tl.permute(tl.reshape(x, (PARTS, 8, x.shape[0] // (8 * PARTS))), (2, 0, 1)), (x.shape[0],))


@triton.jit
def join_blocks(blocks):
    """Join two or four blocks `[n, Q]` to one flat tile `[eights of a block, blocks, 8, Q]` without moving data.

    A thread holds rows in the order of its accumulator rows, as in `token_order`."""
    if len(blocks) == 2:
        return interleave(stack(blocks[0], blocks[1]), 2)
    else:
        n: tl.constexpr = blocks[0].shape[0]
        q: tl.constexpr = blocks[0].shape[1]
        x = stack(stack(blocks[0], blocks[2]), stack(blocks[1], blocks[3]))
        return tl.reshape(tl.permute(tl.reshape(x, (2, 2, n // 8, 8, q)), (2, 1, 0, 3, 4)), (4 * n, q))


@triton.jit
def strided(x):
    """Return a block `[n, D]` in the token order of `KiviFormat.strided`: every eighth of 32 tokens side by side."""
    fours = tl.permute(tl.reshape(x, (x.shape[0] // 32, 4, 8, x.shape[1])), (0, 2, 1, 3))
    return tl.reshape(fours, (x.shape[0], x.shape[1]))


@triton.jit
def unstrided(x):
    """Undo `strided`."""
    eights = tl.permute(tl.reshape(x, (x.shape[0] // 32, 8, 4, x.shape[1])), (0, 2, 1, 3))
    return tl.reshape(eights, (x.shape[0], x.shape[1]))


@triton.jit
def interleave(x, PARTS: tl.constexpr):
    """Interleave the parts of a tile `[n, Q]`, eight rows each, from `part_order` to `token_order`.

    No row moves between threads."""
    parts = tl.reshape(x, (PARTS, x.shape[0] // (8 * PARTS), 8, x.shape[1]))
    return tl.reshape(tl.permute(parts, (1, 0, 2, 3)), (x.shape[0], x.shape[1]))


@triton.jit
def deinterleave(x, PARTS: tl.constexpr):
    """Reorder a tile `[n, Q]` from `token_order` to ascending tokens. No row moves between threads."""
    parts = tl.reshape(x, (x.shape[0] // (8 * PARTS), PARTS, 8, x.shape[1]))
    return tl.reshape(tl.permute(parts, (1, 2, 0, 3)), (x.shape[0], x.shape[1]))
