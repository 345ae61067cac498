"""Types that decode programs share, and attention over packed blocks; `open_tokens.py` handles the ring and the sinks.

Attention is an online softmax over tiles of scores, as in FlashAttention. The weights of a tile are relative to the
tile's own maximum (`weigh`), which gives INT8 weights their full range. The older sums and the tile's sums are then
scaled to the running maximum. Queries are columns, scores are in log2 units."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from qattn_kernels.formats.contract import BlockAt
from qattn_kernels.jit.rows import block_at, first_block
from qattn_kernels.jit.tile_order import join_blocks
from qattn_kernels.ops.decode.masks import mask_block
from qattn_kernels.ops.decode.weights import known_mass, may_skip, soft_cap, weigh


class Scoring(NamedTuple):
    """How scores are computed. Their scale and `sas_threshold` are in log2 units.

    Attributes:
        scale: scale of the products of queries and keys.
        softcap: cap of the scores, 0 for none, in the model's units. A prefill takes it in log2 units
            (`ops.prefill.kernel.attend`).
        window: positions that a query sees back, itself included, if the layer has a local window.
        sas_threshold: SAS treats weights below this as 0.
        tau, budget: limits of sparse V (`SkipLimits`).
    """

    scale: Any
    softcap: Any
    window: Any
    sas_threshold: Any
    tau: Any
    budget: Any


class Codec(NamedTuple):
    """Functions of the formats of keys and values; `formats.contract.JitFormat` documents each.

    Build the tuple inside the call that takes it: a variable inside a kernel cannot hold functions.

    The last four are None if an append ran before the decode."""

    k_locate: Any
    v_locate: Any
    k_run: Any
    v_run: Any
    block_scores: Any
    block_values: Any
    ring_scores: Any
    ring_values: Any
    k_quantize: Any
    k_put: Any
    v_quantize: Any
    v_put: Any


class Program(NamedTuple):
    """The row and KV head of a program, and its queries. Shared by all parts of the context.

    Attributes:
        b, h, bh: row, KV head, and both as one index.
        row: the `layout.Row`.
        capacity: blocks that the row has room for.
        pages: page table, see `jit.rows.block_at`.
        dropped: pointer to the mask bits of the head's first block.
        q_pos: int32 `[Q]`, row positions of the queries, -1 for columns without a query.
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
        begin, end: block range within the row.
        pos, length: pointers to the first token's position and the token count of each of the row's blocks.
        moved: pointer to the slots that this call's close moved into the sink table or back out.
        k_mean_scores: fp32 `[Q]`, products of the queries with the row's mean key.
        limits: the `SkipLimits` of sparse V.
        known: fp32 `[Q]`, weight in log2 that sparse V knows before the first block, see `may_skip`.
    """

    begin: Any
    end: Any
    pos: Any
    length: Any
    moved: Any
    k_mean_scores: Any
    limits: Any
    known: Any


class HeadHome(NamedTuple):
    """Location of the codes of a head's keys or values.

    Attributes:
        index: index of the head among the heads of the same bit width.
        low: whether that width is the lower one of the side.
    """

    index: Any
    low: Any


class Homes(NamedTuple):
    """The `HeadHome` of a head's keys and the `HeadHome` of its values."""

    k: Any
    v: Any


class Run(NamedTuple):
    """Consecutive blocks of one head in which all keys have one bit width and all values have one bit width.

    Build the tuple inside the call that takes it: a variable inside a kernel cannot hold constants.

    Attributes:
        begin, end: block range within the row.
        head: index of the row's first block among the blocks of all heads.
        k, v: index of the row's first block among the blocks with this width of keys, of values. The row's first block
            need not have that width.
        K_BITS, V_BITS: bits per code.
    """

    begin: Any
    end: Any
    head: Any
    k: Any
    v: Any
    K_BITS: Any
    V_BITS: Any


class SkipLimits(NamedTuple):
    """Limits of sparse V: it skips weights below `tau`, up to the share `budget` of a query's sum of weights. Of that,
    a split may use `share`: 1 / the number of splits of packed blocks."""

    tau: Any
    budget: Any
    share: Any


class Sums(NamedTuple):
    """Running state of an online softmax.

    Attributes:
        m: fp32 `[Q]`, the largest score.
        l: fp32 `[Q]`, the sum of the weights relative to `m`.
        acc: fp32 `[DP, Q]`, the sum of weighted values.
    """

    m: Any
    l: Any
    acc: Any


class Skips(NamedTuple):
    """Running counters of sparse V, `[Q]`.

    Attributes:
        lost: the part of `l` whose values were skipped.
        read: tokens that the query saw.
        skipped: tokens whose values were skipped.
    """

    lost: Any
    read: Any
    skipped: Any


@triton.jit
def _packed_scores(K, program, blocks, run, block, at, codec, C: tl.constexpr):
    """Return the masked scores of the packed block at index `at`, and how many of its tokens each query sees."""
    SIDE: tl.constexpr = C.K
    s = codec.block_scores(K, BlockAt(run.head + at, run.k + at, run.K_BITS), program.query, SIDE, C)
    return _whole_scores(s, program, blocks, block, at, C)


@triton.jit
def _whole_scores(s, program, blocks, block, at, C: tl.constexpr):
    """Turn products with a block's keys into masked scores: add the mean key, cap, mask. Returns the same as
    `mask_block`."""
    SIDE: tl.constexpr = C.K
    if SIDE.SMOOTH:
        s += blocks.k_mean_scores[None, :]
    if C.SOFTCAP:
        s = soft_cap(s, program.scoring.softcap)
    return mask_block(s, program, blocks, block, at, C)


@triton.jit
def _location(program, run, block, C: tl.constexpr):
    """Return the location of blocks as `block_at` does. Block numbers after the end of the run map to its last block,
    which masking hides."""
    return block_at(program.pages, program.b, tl.minimum(block, run.end - 1), program.capacity, C)


@triton.jit
def _run_of_tiles(K, V, program, blocks, run, sums, codec, STAGES: tl.constexpr, C: tl.constexpr):
    """Implement `_run` for formats that read `C.TILE` small blocks at a time (`Side.MOST_TILE`)."""
    TILE: tl.constexpr = C.TILE
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    for block in tl.range(run.begin, run.end, TILE, num_stages=STAGES):
        at = run.head + _location(program, run, block + tl.arange(0, TILE), C)
        places, each, seen = (), (), ()
        for i in tl.static_range(TILE):
            places += (_location(program, run, block + i, C),)
            each += (run.head + places[i],)
        scores = codec.block_scores(K, BlockAt(each, at, run.K_BITS), program.query, K_SIDE, C)
        for i in tl.static_range(TILE):
            s, _ = _whole_scores(scores[i], program, blocks, block + i, places[i], C)
            seen += (s,)
        w, alpha, beta, m = weigh(join_blocks(seen), sums.m, program.scoring.sas_threshold, C)
        acc, total = codec.block_values(V, BlockAt(at, at, run.V_BITS), w, sums.acc, alpha, beta, V_SIDE, C)
        sums = Sums(m, sums.l * alpha + total * beta, acc)
    return sums


@triton.jit
def _weighed(V, run, at, w, acc, alpha, beta, codec, C: tl.constexpr):
    """Return the accumulator plus the weighted values of the block at index `at`, and the sum of the weights."""
    SIDE: tl.constexpr = C.V
    return codec.block_values(V, BlockAt(run.head + at, run.v + at, run.V_BITS), w, acc, alpha, beta, SIDE, C)


@triton.jit
def _run_of_blocks(K, V, program, blocks, run, sums, skips, codec, STAGES: tl.constexpr, C: tl.constexpr):
    """Implement `_run` one block at a time."""
    threshold, known, own = program.scoring.sas_threshold, blocks.known, 0.0
    if C.SPARSE_V and C.ENTRIES == 0:  # a part that knows only its own tokens would skip few
        begin = block_at(program.pages, program.b, 0, program.capacity, C)
        s, _ = _packed_scores(K, program, blocks, run, 0, begin, codec, C)
        known, own = known_mass(s, threshold, C), (run.begin == 0).to(tl.float32)
    page = block_at(program.pages, program.b, run.begin, program.capacity, C)
    for block in tl.range(run.begin, run.end, num_stages=STAGES):
        at = page if C.PAGED else block
        s, count = _packed_scores(K, program, blocks, run, block, at, codec, C)
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
                acc, total = _weighed(V, run, at, w, acc, alpha, beta, codec, C)
            skips = Skips(lost, read, skipped)
        else:
            acc, total = _weighed(V, run, at, w, acc, alpha, beta, codec, C)
        sums = Sums(m, l * alpha + total * beta, acc)
        if C.PAGED:  # load the next page early: loads with a fresh address pipeline less deeply
            page = block_at(program.pages, program.b, block + 1, program.capacity, C)
    return sums, skips


@triton.jit
def _run(K, V, program, blocks, run, sums, skips, codec, STAGES: tl.constexpr, C: tl.constexpr):
    """Attend to the blocks of a `Run`."""
    if C.TILE > 1:
        return _run_of_tiles(K, V, program, blocks, run, sums, codec, STAGES, C), skips
    else:
        return _run_of_blocks(K, V, program, blocks, run, sums, skips, codec, STAGES, C)


@triton.jit
def _side_run(S, home, capacity, RUN: tl.constexpr, RUNS: tl.constexpr, I: tl.constexpr, SIDE: tl.constexpr):
    """Return run `I` of a head's keys or values: `(begin, end, first)`, from the format's function `RUN`.

    `first` is the index of the row's first block among the blocks with this bit width, even if that block has another
    width."""
    if RUNS == 1:
        return 0, capacity, home.index * capacity
    else:
        return RUN(S, home, capacity, I, SIDE)


@triton.jit
def packed_part(K, V, program, blocks, homes, sums, skips, codec, STAGES: tl.constexpr, C: tl.constexpr):
    """Attend to packed blocks, run by run.

    Each pair of bit widths gets its own loop, because loads inside a branch are not pipelined."""
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    K_WIDTHS: tl.constexpr = K_SIDE.WIDTHS
    V_WIDTHS: tl.constexpr = V_SIDE.WIDTHS
    capacity, head = program.capacity, first_block(program.pages, program.b, program.h, program.capacity, C)
    if C.PAGED:  # heads have one run
        sums, skips = _run(K, V, program, blocks, Run(blocks.begin, blocks.end, head, head, head, K_SIDE.BITS,
                           V_SIDE.BITS), sums, skips, codec, STAGES, C)  # fmt: skip
    elif len(K_WIDTHS) * len(V_WIDTHS) == 1:
        k, v = homes.k.index * capacity, homes.v.index * capacity
        sums, skips = _run(K, V, program, blocks, Run(blocks.begin, blocks.end, head, k, v, K_SIDE.BITS, V_SIDE.BITS),
                           sums, skips, codec, STAGES, C)  # fmt: skip
    else:
        for i in tl.static_range(len(K_WIDTHS)):
            for j in tl.static_range(len(V_WIDTHS)):
                k_begin, k_end, k = _side_run(K, homes.k, capacity, codec.k_run, len(K_WIDTHS), i, K_SIDE)
                v_begin, v_end, v = _side_run(V, homes.v, capacity, codec.v_run, len(V_WIDTHS), j, V_SIDE)
                begin = tl.maximum(blocks.begin, tl.maximum(k_begin, v_begin))
                end = tl.minimum(blocks.end, tl.minimum(k_end, v_end))
                if begin < end:
                    sums, skips = _run(K, V, program, blocks, Run(begin, end, head, k, v, K_WIDTHS[i], V_WIDTHS[j]),
                                       sums, skips, codec, STAGES, C)  # fmt: skip
    return sums, skips
