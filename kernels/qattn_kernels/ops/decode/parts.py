"""What decode programs share, and the part of the context that is packed; the other is in `open_tokens.py`.

Each part is an online softmax over tiles of scores, as in FlashAttention: `weigh` takes a tile against its own maximum,
and what was summed before is scaled down when the running maximum rises. Queries are columns, scores are in log2 units.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.contract import BlockAt
from qattn_kernels.formats.head_bits import ALL, NONE, number
from qattn_kernels.jit.rows import block_at, first_block
from qattn_kernels.jit.tile_order import join_blocks
from qattn_kernels.ops.decode.masks import mask_block
from qattn_kernels.ops.decode.weights import known_mass, may_skip, soft_cap, weigh


class Scoring(NamedTuple):
    """How scores are made, in log2 units but for the cap.

    Attributes:
        scale: of products of queries and keys.
        softcap: what they are capped at, 0 for nothing; in the units of the model, while a prefill takes it in log2
            units (`ops.prefill.kernel.attend`).
        window: positions that a query sees back, itself included, where the layer has a local window.
        sas_threshold: below it SAS takes a weight for 0.
    """

    scale: Any
    softcap: Any
    window: Any
    sas_threshold: Any


class Codec(NamedTuple):
    """Functions of the formats of keys and of values; `formats.contract.JitFormat` says what each does. Made in the
    call that takes it: a variable inside a kernel can hold no functions."""

    k_locate: Any
    v_locate: Any
    block_scores: Any
    block_values: Any
    ring_scores: Any
    ring_values: Any


class Program(NamedTuple):
    """What all parts share: the row and KV head of a program, and its queries.

    Attributes:
        b, h, bh: row, KV head, and both as one index.
        row: the `layout.Row`, with room for `capacity` blocks, which lie where `pages` says (`jit.rows.block_at`).
        dropped: pointer to the mask bits of the head's first block.
        q_pos: int32 `[Q]` row positions of the queries, -1 for columns without one.
        query: the `QueryTile`.
        scoring: the `Scoring`.
    """

    b: Any
    h: Any
    bh: Any
    row: Any
    capacity: Any
    pages: Any
    dropped: Any
    q_pos: Any
    query: Any
    scoring: Any


class Blocks(NamedTuple):
    """The packed blocks that a program reads.

    Attributes:
        begin, end: their indices among the row's blocks.
        pos, length: pointers to the position of the first token of each of a row's blocks, and to its count of tokens.
        moved: pointer to the slots that this call's close moved into the table of sinks or out of it.
        k_mean_scores: fp32 `[Q]`, products of the queries with the mean that the keys are coded around.
        limits: the `SkipLimits` of sparse V.
        known: fp32 `[Q]`, the weight, in log2, that sparse V knows of before the first block: see `may_skip`.
    """

    begin: Any
    end: Any
    pos: Any
    length: Any
    moved: Any
    k_mean_scores: Any
    limits: Any
    known: Any


class Homes(NamedTuple):
    """Where a head's keys and values lie: its index among the heads of their width, and whether that is 2 bits."""

    k: Any
    k_low: Any
    v: Any
    v_low: Any


class FirstBlock(NamedTuple):
    """Indices of a head's first block: among the blocks of all heads, and among those whose keys, whose values are as
    wide."""

    head: Any
    k: Any
    v: Any


class SkipLimits(NamedTuple):
    """Sparse V skips weights below `tau`, of a row's sum no more than `budget`, in which a split has a `share`."""

    tau: Any
    budget: Any
    share: Any


class Sums(NamedTuple):
    """Running state of an online softmax: `m` `[Q]` the largest score, `l` `[Q]` the sum of the weights against it,
    `acc` `[DP, Q]` the sum of weighted values."""

    m: Any
    l: Any
    acc: Any


class Skips(NamedTuple):
    """Sparse V, `[Q]`: what of `l` belongs to values that were not read, tokens seen, and those whose values were not
    read."""

    lost: Any
    read: Any
    skipped: Any


@triton.jit
def _packed_scores(K, program, blocks, first, block, at, codec, K_BITS: tl.constexpr, C: tl.constexpr):
    """Scores of a packed block that lies `at`, and how many of its tokens each query sees."""
    SIDE: tl.constexpr = C.K
    s = codec.block_scores(K, BlockAt(first.head + at, first.k + at, K_BITS), program.query, SIDE, C)
    return _whole_scores(s, program, blocks, block, at, C)


@triton.jit
def _whole_scores(s, program, blocks, block, at, C: tl.constexpr):
    """Products with a block's keys with all else that makes scores of them; otherwise as `mask_block`."""
    SIDE: tl.constexpr = C.K
    if SIDE.SMOOTH:
        s += blocks.k_mean_scores[None, :]
    if C.SOFTCAP:
        s = soft_cap(s, program.scoring.softcap)
    return mask_block(s, program, blocks, block, at, C)


@triton.jit
def _place(program, blocks, block, C: tl.constexpr):
    """Where blocks lie; of those behind the row's last one, which a tile of several may have, that one: no query sees
    them yet."""
    return block_at(program.pages, program.b, tl.minimum(block, blocks.end - 1), program.capacity, C)


@triton.jit
def _tiles_part(K, V, program, blocks, first, sums, codec,
                K_BITS: tl.constexpr, V_BITS: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """`_packed_part` for formats whose values are summed by tiles of `C.TILE` small blocks."""
    TILE: tl.constexpr = C.TILE
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    for block in tl.range(blocks.begin, blocks.end, TILE, num_stages=STAGES):
        at = first.head + _place(program, blocks, block + tl.arange(0, TILE), C)
        places, each, seen = (), (), ()
        for i in tl.static_range(TILE):
            places += (_place(program, blocks, block + i, C),)
            each += (first.head + places[i],)
        scores = codec.block_scores(K, BlockAt(each, at, K_BITS), program.query, K_SIDE, C)
        for i in tl.static_range(TILE):
            s, _ = _whole_scores(scores[i], program, blocks, block + i, places[i], C)
            seen += (s,)
        w, alpha, beta, m = weigh(join_blocks(seen), sums.m, program.scoring.sas_threshold, C)
        acc, total = codec.block_values(V, BlockAt(at, at, V_BITS), w, sums.acc, alpha, beta, V_SIDE, C)
        sums = Sums(m, sums.l * alpha + total * beta, acc)
    return sums


@triton.jit
def _blocks_part(K, V, program, blocks, first, sums, skips, codec,
                 K_BITS: tl.constexpr, V_BITS: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """`packed_part` for blocks of one width each of keys and values, one at a time."""
    SIDE: tl.constexpr = C.V
    threshold, known, own = program.scoring.sas_threshold, blocks.known, 0.0
    if C.SPARSE_V and C.ENTRIES == 0:  # a part that judged by its own tokens alone would find few to skip
        begin = block_at(program.pages, program.b, 0, program.capacity, C)
        s, _ = _packed_scores(K, program, blocks, first, 0, begin, codec, K_BITS, C)
        known, own = known_mass(s, threshold, C), (blocks.begin == 0).to(tl.float32)
    page = block_at(program.pages, program.b, blocks.begin, program.capacity, C)
    for block in tl.range(blocks.begin, blocks.end, num_stages=STAGES):
        at = page if C.PAGED else block
        s, count = _packed_scores(K, program, blocks, first, block, at, codec, K_BITS, C)
        w, alpha, beta, m = weigh(s, sums.m, threshold, C)
        l, acc = sums.l, sums.acc
        if C.SPARSE_V:
            total = tl.sum(w, 0)
            lost, read, skipped = skips.lost * alpha, skips.read + count, skips.skipped
            if may_skip(program.q_pos, m, beta, l * alpha + total * beta, lost + total * beta, known, own,
                        blocks.limits):  # fmt: skip
                acc = acc * alpha[None, :]
                lost += total * beta
                skipped += count
            else:
                acc, total = codec.block_values(
                    V, BlockAt(first.head + at, first.v + at, V_BITS), w, acc, alpha, beta, SIDE, C
                )
            skips = Skips(lost, read, skipped)
        else:
            acc, total = codec.block_values(
                V, BlockAt(first.head + at, first.v + at, V_BITS), w, acc, alpha, beta, SIDE, C
            )
        sums = Sums(m, l * alpha + total * beta, acc)
        if C.PAGED:  # a block ahead: a load whose address was loaded in the same turn is not pipelined as far
            page = block_at(program.pages, program.b, block + 1, program.capacity, C)
    return sums, skips


@triton.jit
def _packed_part(K, V, program, blocks, first, sums, skips, codec,
                 K_BITS: tl.constexpr, V_BITS: tl.constexpr, STAGES: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """`packed_part` for blocks of one width each of keys and values."""
    if C.TILE > 1:
        return _tiles_part(K, V, program, blocks, first, sums, codec, K_BITS, V_BITS, STAGES, C), skips
    else:
        return _blocks_part(K, V, program, blocks, first, sums, skips, codec, K_BITS, V_BITS, STAGES, C)


@triton.jit
def _parts_by_head(K, V, program, blocks, head, homes, sums, skips, codec,
                   STAGES: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """`packed_part` where all blocks of a head have as many bits."""
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    capacity = program.capacity
    if C.PAGED:  # where heads have one width
        first = FirstBlock(head, head, head)
    else:
        first = FirstBlock(head, homes.k * capacity, homes.v * capacity)
    if K_SIDE.LOW <= ALL and V_SIDE.LOW <= ALL:
        sums, skips = _packed_part(
            K, V, program, blocks, first, sums, skips, codec, K_SIDE.BITS, V_SIDE.BITS, STAGES, C
        )
    else:
        for pair in tl.static_range(4):  # both 4 bits, K 2, V 2, both 2
            if (K_SIDE.LOW > NONE if pair % 2 else K_SIDE.LOW != ALL) and (
                V_SIDE.LOW > NONE if pair // 2 else V_SIDE.LOW != ALL
            ):
                if (homes.k_low == (pair % 2 == 1)) & (homes.v_low == (pair // 2 == 1)):
                    sums, skips = _packed_part(
                        K, V, program, blocks, first, sums, skips, codec, 4 >> pair % 2, 4 >> pair // 2,
                        STAGES, C,
                    )  # fmt: skip
    return sums, skips


@triton.jit
def _parts_by_age(K, V, program, blocks, head, homes, sums, skips, codec,
                  STAGES: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """`packed_part` where a row's first blocks have half the bits of the others, of keys or of values."""
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    aged = number(K.aged) if K_SIDE.AGED else number(V.aged)
    later = program.capacity - aged
    for young in tl.static_range(2):
        begin = tl.maximum(blocks.begin, aged) if young else blocks.begin
        end = blocks.end if young else tl.minimum(blocks.end, aged)
        k, v = homes.k * program.capacity, homes.v * program.capacity
        if K_SIDE.AGED:
            k = homes.k * later - aged if young else homes.k * aged
        if V_SIDE.AGED:
            v = homes.v * later - aged if young else homes.v * aged
        part = Blocks(
            begin, end, blocks.pos, blocks.length, blocks.moved, blocks.k_mean_scores, blocks.limits, blocks.known
        )
        sums, skips = _packed_part(
            K, V, program, part, FirstBlock(head, k, v), sums, skips, codec,
            K_SIDE.BITS if young or not K_SIDE.AGED else K_SIDE.BITS // 2,
            V_SIDE.BITS if young or not V_SIDE.AGED else V_SIDE.BITS // 2, STAGES, C,
        )  # fmt: skip
    return sums, skips


@triton.jit
def packed_part(K, V, program, blocks, homes, sums, skips, codec,
                STAGES: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Attention over packed blocks. Each pair of widths has a loop of its own: loads inside a branch are not
    pipelined."""
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    head = first_block(program.pages, program.b, program.h, program.capacity, C)
    if K_SIDE.AGED or V_SIDE.AGED:
        return _parts_by_age(K, V, program, blocks, head, homes, sums, skips, codec, STAGES, C)
    else:
        return _parts_by_head(K, V, program, blocks, head, homes, sums, skips, codec, STAGES, C)
