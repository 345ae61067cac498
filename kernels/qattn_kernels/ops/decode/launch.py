"""Launches of the decode: parts of the context, then their merge."""

from __future__ import annotations

import math

import torch

from qattn_kernels.formats.contract import jit_of
from qattn_kernels.launch.call import Call
from qattn_kernels.launch.launches import launch
from qattn_kernels.layer.skip_counts import skip_counts_of
from qattn_kernels.ops.decode.kernel import decode_kernel, merge_kernel
from qattn_kernels.ops.decode.table import chip_of, choose

LOG2E = math.log2(math.e)
FEW_SPLITS, MANY_SPLITS = 8, 64  # parts that the merge weighs at once: two kernels, whatever the rows and lengths


def decode(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a short call after its append; commits the rows' lengths.

    Returns:
        `[B, Hq, T, D]` in the query's dtype, memory in the order B, T, Hq, D; fp32 log-sum-exp `[B, Hq, T]`.
    """
    size, state, scores, batch, tokens = call.sizes, call.state, call.scores, call.batch, call.tokens
    k, v = jit_of(call.spec.k), jit_of(call.spec.v)
    rows = tokens * size.G
    tuned = choose(size, call.spec, call.key.dtype, batch * -(-rows // size.Q), chip_of(call.key.device))
    few, many, long, _ = tuned.plan
    most = few if call.blocks < few * long else many
    splits = min(most, call.blocks) + size.OPEN

    over_ring = (k.ring_scores, v.ring_values) if size.RING else (None, None)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=call.query.device)

    parts, stats = (empty(batch * size.H, splits, rows, n) for n in (size.D, 3 if size.SPARSE_V else 2))
    skip_counts, sparsity = skip_counts_of(state) if size.SPARSE_V else None, call.spec.sparsity
    sas_threshold = call.spec.compute.sas_threshold * LOG2E
    scoring = scores.scale * LOG2E, float(scores.softcap), scores.window, sas_threshold  # a `parts.Scoring`
    launch(
        decode_kernel, (batch * size.H, -(-rows // size.Q), splits),
        call.query, call.query.stride()[:3], call.rows, call.k, call.v, call.k_mean, call.k_sinks, call.v_sinks,
        call.table, call.moved, state["dropped"], state["block_pos"],
        state["block_len"], call.row_state, parts, stats, skip_counts, call.pages, call.blocks, batch, tokens,
        scoring, (sparsity.tau, sparsity.budget),
        *tuned.plan, tuned.stages, k.locate, v.locate, k.scores, v.values, v.channels, *over_ring,
        size, num_warps=tuned.warps, maxnreg=tuned.registers, enable_fp_fusion=True,
    )  # fmt: skip
    chunk = FEW_SPLITS if many <= FEW_SPLITS else MANY_SPLITS  # not of the capacity: sums must not depend on it
    out = empty(batch, tokens, size.H * size.G, size.D, dtype=call.query.dtype)
    lse = empty(batch, size.H * size.G, tokens)
    launch(
        merge_kernel, (rows, size.H, batch),
        parts, stats, skip_counts, call.rows, stats if scores.sinks is None else scores.sinks, out, lse, call.table,
        state["dropped"], call.blocks, splits, tokens,
        *tuned.plan, chunk, scores.sinks is not None, size, num_warps=1 if chunk == FEW_SPLITS else 4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out.transpose(1, 2), lse
