"""Decode attention in Triton: split-KV, as in FlashDecoding.

The context of a row has three parts: packed blocks, the ring of open tokens, and the sink pool. It is divided into
splits (`splits.py`). One program attends to one split with an online softmax (`parts.py`, `open_tokens.py`). The splits
are then combined by their log-sum-exp (`merge.py`). `ops/decode/reference.py` is the specification.

For the format `flashq` this is TurboAttention's Algorithm 2, with the key channel scale folded into the query and the
value channel scale into the accumulator.

Queries are columns of a tile, scores are in log2 units. Query `n` of a KV head belongs to token `n // G` and to query
head `n % G` of its GQA group.

`C` is a `launch.constants.Sizes` and `row` a `layout.Row`. `K` and `V` hold the tensors of one side of the layer, in
the form that its format's functions take (`formats.contract.JitFormat`)."""

from __future__ import annotations

import triton
import triton.language as tl

from qattn_kernels.jit.dependent import await_previous_kernel, release_next_kernel
from qattn_kernels.jit.math import NOTHING
from qattn_kernels.jit.rows import commit_rows, first_bits, load_row, locate, queries_end
from qattn_kernels.jit.tokens import Source, row_before
from qattn_kernels.layout import BlockState
from qattn_kernels.ops.append.kernel import Codec as Append
from qattn_kernels.ops.append.kernel import append_token, early_token, note_row
from qattn_kernels.ops.decode.merge import Output, Parts, store_output
from qattn_kernels.ops.decode.open_tokens import SinkPool, last_sink, ring_part, sink_part, sink_scores
from qattn_kernels.ops.decode.parts import (
    Blocks,
    Codec,
    HeadHome,
    Homes,
    Program,
    Scoring,
    SkipLimits,
    Skips,
    Sums,
    packed_part,
)
from qattn_kernels.ops.decode.queries import QuerySource, load_queries, query_tile
from qattn_kernels.ops.decode.splits import (
    Results,
    blocks_seen,
    cut_blocks,
    number_of_splits,
    range_of,
    read_rule,
    split_at,
    split_exists,
    store_split,
)
from qattn_kernels.ops.decode.weights import known_mass


@triton.jit
def _k_mean_scores(K_MEAN, program, C: tl.constexpr):
    """Return products fp32 `[Q]` of the queries with the row's mean key; zeros unless keys are smoothed."""
    SIDE: tl.constexpr = C.K
    if SIDE.SMOOTH:
        d = tl.arange(0, SIDE.DP)
        k_mean = tl.load(K_MEAN + program.bh * SIDE.D + d, mask=d < SIDE.D, other=0.0)
        return tl.sum(program.query.scaled * k_mean[:, None], 0)
    else:
        return tl.full([C.Q], 0.0, tl.float32)


@triton.jit
def _sink_mass(pool, program, codec, C: tl.constexpr):
    """Return the weight that sparse V knows before it reads a block: `known_mass` of the sink pool, `[Q]`.

    The result is fp32, in log2. Without a sink pool it is `NOTHING`, and `packed_part` uses the first block instead."""
    if C.SPARSE_V and C.ENTRIES > 0:
        return known_mass(sink_scores(pool, program, 0, codec, C), program.scoring.sas_threshold, C)
    else:
        return tl.full([C.Q], NOTHING, tl.float32)


@triton.jit
def _nothing(C: tl.constexpr):
    """Return the `Sums` and `Skips` of no token."""
    SIDE: tl.constexpr = C.V
    zeros, counts = tl.full([C.Q], 0, tl.float32), tl.full([C.Q], 0, tl.int32)
    sums = Sums(tl.full([C.Q], NOTHING, tl.float32), zeros, tl.full([SIDE.DP, C.Q], 0, tl.float32))
    return sums, Skips(zeros, counts, counts)


@triton.jit
def _open_part(LAYER, pool, program, split, open, sums, skips, CODEC, C: tl.constexpr):
    """Add the open tokens, the sinks or both that one of the first `open` splits reads to its `Sums` and `Skips`."""
    if C.RING > 0:
        if (split == 0) if C.RING_PARTS == 1 else (split < C.RING_PARTS):  # the first takes fewer registers
            sums, skips = ring_part(LAYER.k, LAYER.v, program, split, sums, skips, Codec(*CODEC), C)
    if C.ENTRIES > 0:
        if split == open - 1:
            sums, skips = sink_part(pool, program, sums, skips, Codec(*CODEC), C)
    return sums, skips


@triton.jit
def _homes(LAYER, b, h, CODEC, C: tl.constexpr):
    """Return the `Homes` of a head."""
    K_SIDE: tl.constexpr = C.K
    V_SIDE: tl.constexpr = C.V
    _, k_head, k_low = locate(LAYER.k, b, h, Codec(*CODEC).k_locate, K_SIDE, C)
    _, v_head, v_low = locate(LAYER.v, b, h, Codec(*CODEC).v_locate, V_SIDE, C)
    return Homes(HeadHome(k_head, k_low), HeadHome(v_head, v_low))


@triton.jit
def _take_token(NEW, span_stride, ROWS, LAYER, early, row, bh, split, last, NB, CODEC, C: tl.constexpr):
    """Store the `Row` if this is split 0 of head 0, and write the row's new token if this split reads its `last` block.

    Arguments as in `decode_kernel`. `early`: what `early_token` loaded."""
    b, h = bh // C.H, bh % C.H
    if (h == 0) & (split == 0):
        note_row(ROWS, NEW[1], span_stride, row, b)
    if last & (row.count > 0):
        append_token(LAYER, Source(*NEW[0]), early, row, b, h, NB,
                     Append(Codec(*CODEC).k_quantize, None, None, Codec(*CODEC).k_put, None, None),
                     Append(Codec(*CODEC).v_quantize, None, None, Codec(*CODEC).v_put, None, None), C)  # fmt: skip


@triton.jit
def _blocks_part(LAYER, program, pool, begin, end, cut, homes, sums, skips, CODEC, STAGES: tl.constexpr,
                 C: tl.constexpr):  # fmt: skip
    """Add the packed blocks from `begin` to `end` to the `Sums` and `Skips`. `cut`: the row's `Cut`."""
    state, scores = BlockState(*LAYER.blocks), program.scoring
    share = 1.0 / number_of_splits(cut) if C.SPARSE_V else 1.0
    limits = SkipLimits(scores.tau, scores.budget, share)
    k_mean_scores = _k_mean_scores(LAYER.k_mean, program, C)
    known = _sink_mass(pool, program, Codec(*CODEC), C)
    rows = 0 if C.PAGED else program.b * program.capacity
    pos, length = state.block_pos + rows, state.block_len + rows
    packed = Blocks(begin, end, pos, length, LAYER.sinks.moved, k_mean_scores, limits, known)
    return packed_part(LAYER.k, LAYER.v, program, packed, homes, sums, skips, Codec(*CODEC), STAGES, C)


@triton.jit
def _store_alone(OUTPUT, program, n, T, nonfinite, sums, C: tl.constexpr):
    """Store the output of queries `n` whose only split has these `Sums`, as a merge would."""
    SIDE: tl.constexpr = C.V
    acc = tl.trans(tl.where(nonfinite[None, :], float("nan"), sums.acc))
    merged, output = Parts(sums.m, sums.l, sums.l, acc), Output(OUTPUT[0], OUTPUT[1], None)
    store_output(output, merged, None, program.row, program.b, program.h, n, tl.arange(0, SIDE.DP), T, C)


@triton.jit(do_not_specialize=["span_stride", "NB", "T"])
def decode_kernel(NB, T, SHARES, span_stride, scoring, QUERIES, ROWS, RESULTS, OUTPUT, NEW, LAYER, CODEC,
                  STAGES: tl.constexpr, C: tl.constexpr):  # fmt: skip
    """Attend to one split for up to `Q` queries. One program per (row and KV head, tile of queries, split).

    The first `C.RING_PARTS` splits read the ring, the next one the sink pool if there is one. If `Rule.open` is below
    `C.OPEN`, one split reads both. The others share a row's blocks (`cut_blocks`); those that a short row does not need
    end at once. `split_at` says which start first. The merge commits all lengths to `LAYER`. Without a merge, the last
    program of the grid does. The mask bits cover masked tokens, and tokens that were in the sink pool before the call.

    Arguments are in the order of their first use: a program waits some 0.1 us for each 64 bytes of them.

    Args:
        NB, T: capacity of a row in blocks, tokens of the call. SHARES: from `table.encoded`.
        QUERIES, scoring, CODEC: fields of a `QuerySource`, `Scoring` and `Codec`.
        ROWS: int32 `[B, ROW_FIELDS]`, each `Row` as it was before the call. A decode that appends stores it.
        RESULTS: fields of a `Results`. OUTPUT: `out` and `lse` of an `Output` if a row has one split, else None.
        NEW: `SOURCE` and `SPANS` of `short_kernel`, if the decode appends; None after an append. The split that reads
            a row's last block writes the token first. span_stride: as in `short_kernel`.
        LAYER: the `launch.call.LayerTensors`. STAGES: loads in flight.
    """
    rule, tile, splits = read_rule(SHARES), tl.program_id(1), tl.num_programs(2)
    split = split_at(tl.program_id(2), NB, rule)
    heads = tl.num_programs(0) if OUTPUT is None else tl.num_programs(0) - 1  # the last program commits
    bh, attends = tl.minimum(tl.program_id(0), heads - 1), tl.program_id(0) < heads
    await_previous_kernel(C.DEPENDENT)
    b, h = bh // C.H, bh % C.H
    row = load_row(ROWS, b) if NEW is None else row_before(LAYER, NEW[1], span_stride, b, NB, C)
    if NEW is not None:
        early = early_token(LAYER, Source(*NEW[0]), b, h, 1, True, C)
    # Load head addresses, sinks and a step's queries while the row itself is loading: none depends on the row.
    homes = _homes(LAYER, b, h, CODEC, C)
    sinks, dropped, PAGES = LAYER.sinks, BlockState(*LAYER.blocks).dropped, LAYER.pages
    pool = SinkPool(sinks.k, sinks.v, sinks.table, last_sink(sinks.table, bh, split == rule.open - 1, C))
    n = tile * C.Q + tl.arange(0, C.Q)
    t, real = n // C.G, n // C.G < row.count
    q = load_queries(QuerySource(*QUERIES), b, h, n, t, row, T, C)
    q_pos = tl.where(t < queries_end(row, T, C), row.length + t, -1)
    cut = cut_blocks(blocks_seen(row, NB, C), rule, C)
    begin, end = range_of(cut, split - rule.open)
    if NEW is not None:
        last = (begin < end) & (end == cut.blocks)
        _take_token(NEW, span_stride, ROWS, LAYER, early, row, bh, split, last, NB, CODEC, C)
    if OUTPUT is None:  # one split alone stores results of rows without tokens too
        attends = attends & split_exists(split, row, cut, rule, C)
    elif ~attends & (tile == 0):
        commit_rows(ROWS, LAYER, heads // C.H, T, C)
    if attends:
        scores = Scoring(*scoring)
        query, nonfinite = query_tile(q, scores.scale, C)
        sums, skips = _nothing(C)
        program = Program(b, h, bh, row, NB, PAGES, first_bits(dropped, PAGES, b, h, NB, C), q_pos, query, scores)
        if split < rule.open:
            sums, skips = _open_part(LAYER, pool, program, split, rule.open, sums, skips, CODEC, C)
        else:
            sums, skips = _blocks_part(LAYER, program, pool, begin, end, cut, homes, sums, skips, CODEC, STAGES, C)
        release_next_kernel(C.DEPENDENT)
        if OUTPUT is not None:
            _store_alone(OUTPUT, program, n, T, nonfinite, sums, C)
        else:
            store_split(Results(*RESULTS), bh, split, splits, n, T, real, nonfinite, sums, skips, C)
