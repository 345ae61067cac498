"""Launch the decode: attention over splits of the context, then their merge."""

from __future__ import annotations

import math

import torch

from qattn_kernels.chip import chip_of
from qattn_kernels.formats.contract import jit_of
from qattn_kernels.launch.call import Call
from qattn_kernels.launch.constants import FEW_SPLITS, Sizes, power_of_two
from qattn_kernels.launch.launches import launch
from qattn_kernels.launch.options import warps_of
from qattn_kernels.layer.skip_counts import skip_counts_of
from qattn_kernels.ops.decode.kernel import decode_kernel
from qattn_kernels.ops.decode.merge import merge_kernel
from qattn_kernels.ops.decode.table import Shares, choose

LOG2E = math.log2(math.e)
MERGED = 4096  # partial numbers that one warp holds at once, in half of its registers
ONE_WARP, MANY_SPLITS = 16, 64  # splits that one warp and four warps merge at once


def decode(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of a short call, and commit the row lengths. The append of the call must have run.

    Returns:
        Output `[B, Hq, T, D]` in the query's dtype, with memory order B, T, Hq, D, and fp32 log-sum-exp `[B, Hq, T]`.
    """
    size, batch, tokens = call.sizes, call.batch, call.tokens
    k, v = jit_of(call.spec.k), jit_of(call.spec.v)
    rows = tokens * size.G
    tuned = choose(size, call.spec, call.key.dtype, batch * -(-rows // size.Q), chip_of(call.key.device))
    results = results_of(call, tuned.shares)
    over_ring = (k.ring_scores, v.ring_values) if size.RING else (None, None)
    sparsity = call.spec.sparsity
    launch(
        decode_kernel, (batch * size.H, -(-rows // size.Q), results[0].shape[1]),
        (call.turned, call.turned.stride()[:3]), call.rows, call.layer, results, call.blocks, batch, tokens,
        scoring(call), (sparsity.tau, sparsity.budget), *tuned.shares,
        (k.locate, v.locate, k.run, v.run, k.scores, v.values, *over_ring), tuned.stages, size,
        num_warps=tuned.warps, maxnreg=tuned.registers, enable_fp_fusion=True,
    )  # fmt: skip
    chunk, queries, warps = _merging(size, tuned.shares)
    return merge(call, results, tuned.shares, chunk, queries, warps_of(size.V.DP, warps))


def _merging(size: Sizes, shares: Shares) -> tuple[int, int, int]:
    """Return how many splits and queries a program of the merge takes at once, and its warps.

    Many rows have few splits each, but programs of one query would not all run at once: on an H200, a program of four
    queries takes 3.0 us in place of 3.8 (64 rows, 512 tokens, `int8`). The number of launched splits does not matter,
    because sums would depend on the capacity."""
    if shares.many + size.OPEN <= FEW_SPLITS:
        return FEW_SPLITS, min(power_of_two(size.G), MERGED // (FEW_SPLITS * size.V.DP)), 1
    return (ONE_WARP, 1, 1) if shares.many <= ONE_WARP else (MANY_SPLITS, 1, 4)


def scoring(call: Call) -> tuple[float, float, int, float]:
    """Return a `parts.Scoring` as a plain tuple."""
    scores = call.scores
    return scores.scale * LOG2E, float(scores.softcap), abs(scores.window), call.spec.compute.sas_threshold * LOG2E


def results_of(call: Call, shares: Shares) -> tuple:
    """Return a `splits.Results` as a plain tuple, with uninitialised buffers for the partial results of all splits."""
    (few, many, long, _), size = shares, call.sizes
    most = few if call.blocks < few * long else many
    shape = call.batch * size.H, min(most, call.blocks) + size.OPEN, call.tokens * size.G
    device = call.query.device
    out = torch.empty((*shape, size.V.D), dtype=torch.float32, device=device)
    stats = torch.empty((*shape, 3 if size.SPARSE_V else 2), dtype=torch.float32, device=device)
    return out, stats, skip_counts_of(call.state) if size.SPARSE_V else None


def merge(
    call: Call, results: tuple, shares: Shares, chunk: int, queries: int, warps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the splits of each query by their log-sum-exp, `chunk` splits of `queries` queries at once.

    Returns:
        The results of `decode`."""
    size, device = call.sizes, call.query.device
    heads = size.H * size.G
    out = torch.empty((call.batch, call.tokens, heads, size.V.D), dtype=call.query.dtype, device=device)
    lse = torch.empty((call.batch, heads, call.tokens), dtype=torch.float32, device=device)
    launch(
        merge_kernel, (-(-call.tokens * size.G // queries), size.H, call.batch),
        results, call.rows, call.layer, (out, lse, call.scores.sinks), call.blocks, results[0].shape[1], call.tokens,
        *shares, chunk, queries, size, num_warps=warps, enable_fp_fusion=True,
    )  # fmt: skip
    return out.transpose(1, 2), lse
