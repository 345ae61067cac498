"""Launch the decode: attention over splits of the context, then their merge."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from qattn_kernels.chip import chip_of
from qattn_kernels.formats.contract import jit_of
from qattn_kernels.launch.call import Call
from qattn_kernels.launch.constants import Sizes, power_of_two
from qattn_kernels.launch.launches import launch
from qattn_kernels.launch.options import dependent, warps_of
from qattn_kernels.layer.skip_counts import skip_counts_of
from qattn_kernels.ops.decode.kernel import decode_kernel
from qattn_kernels.ops.decode.merge import merge_kernel
from qattn_kernels.ops.decode.table import Launch, Shares, choose, encoded, ends_alone, takes_token

LOG2E = math.log2(math.e)
MERGED = 4096  # partial numbers that one warp holds at once, in half of its registers
FEW = 8  # splits that a program of all channels loads first
FEWEST = 4  # splits that a program of several queries merges at once
ONE_WARP = 16  # splits that one warp merges at once


class _Plan(NamedTuple):
    """How the decode of a call runs.

    Attributes:
        tuned: launch configuration of the splits. stages: loads in flight.
        splits: splits of the launch.
        single: whether a row's only split stores the output, without a merge.
        appends: whether the split of the last block writes the call's token, without an append.
    """

    tuned: Launch
    stages: int
    splits: int
    single: bool
    appends: bool


def _plan(call: Call) -> _Plan:
    size, rows = call.sizes, call.tokens * call.sizes.G
    tuned = choose(size, call.spec, call.key.dtype, call.batch * -(-rows // size.Q), chip_of(call.key.device))
    splits = splits_of(call, tuned.shares)
    single = splits == tuned.shares.few == 1 and ends_alone(size, call.spec) and call.scores.sinks is None
    stages = tuned.alone if single else tuned.stages
    return _Plan(tuned, stages, splits, single, not single and rows <= size.Q and takes_token(size, call.spec))


def appends(call: Call) -> bool:
    """Return whether `decode` writes the call's token itself, so that no append must run before it."""
    return not call.spec.latent and _plan(call).appends


def decode(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of a short call, and commit the row lengths. Unless `appends`, the append of the call must
    have run.

    Returns:
        Output `[B, Hq, T, D]` in the query's dtype, with memory order B, T, Hq, D, and fp32 log-sum-exp `[B, Hq, T]`.
    """
    size, tokens = call.sizes, call.tokens
    k, v = jit_of(call.spec.k), jit_of(call.spec.v)
    tuned, stages, splits, single, writes = _plan(call)
    output, results = output_of(call), () if single else results_of(call, splits)
    over_ring = (k.ring_scores, v.ring_values) if size.RING else (None, None)
    writers = (k.quantize_tokens, k.put, v.quantize_tokens, v.put) if writes else (None, None, None, None)
    span, stride = call.spans
    launch(
        decode_kernel, (call.batch * size.H + single, -(-tokens * size.G // size.Q), splits),
        call.blocks, tokens, encoded(tuned.shares), stride, scoring(call), (call.turned, call.turned.stride()[:3]),
        call.rows, results, output[:2] if single else None, (call.source, span) if writes else None, call.layer,
        (k.locate, v.locate, k.run, v.run, k.scores, v.values, *over_ring, *writers), stages, size,
        num_warps=tuned.warps, maxnreg=tuned.registers, enable_fp_fusion=True, **dependent(size),
    )  # fmt: skip
    if not single:
        merge(call, results, output, tuned.shares, merging(size, tuned.shares))
    return output[0].transpose(1, 2), output[1]


class Merging(NamedTuple):
    """Launch configuration of a merge.

    Attributes:
        few: splits that a program loads before it knows how many there are.
        chunk: splits that it loads at once, `few` at least.
        queries: queries of a program.
        channels: channels of a program.
        warps: warps of a program.
    """

    few: int
    chunk: int
    queries: int
    channels: int
    warps: int


def merging(size: Sizes, shares: Shares) -> Merging:
    """Return how a merge is launched.

    Few rows have many splits each. Programs of few channels load them all at once, if channels are not rotated: on an
    H200, one row of 32,768 tokens takes 2.4 us in place of 4.4 (`turbo`). Many rows have few splits each, but programs
    of one query would not all run at once: a program of four queries takes 3.0 us in place of 3.8 (64 rows, 512 tokens,
    `int8`). The number of launched splits does not matter, because sums would depend on the capacity. Small splits
    do not count: only long contexts have them, whose merge matters little."""
    width, parts = size.V.DP, max(shares.few, shares.large or shares.many) + shares.open
    fewest = FEWEST if size.RING_PARTS <= 1 else FEW  # several programs read such a ring
    if parts <= fewest:
        queries = min(power_of_two(size.G), max(1, MERGED // (fewest * width)))
        return Merging(fewest, fewest, queries, width, warps_of(width, 1))
    if shares.many <= ONE_WARP:
        return Merging(FEW, ONE_WARP, 1, width, warps_of(width, 1))
    if size.V.ROTATION is not None:
        return Merging(FEW, 64, 1, width, warps_of(width, 4))
    return Merging(2 * FEW, 128, 1, min(width, 32), 2)


def scoring(call: Call) -> tuple[float, float, int, float, float, float]:
    """Return a `parts.Scoring` as a plain tuple."""
    scores = call.scores
    threshold, sparsity = call.spec.compute.sas_threshold * LOG2E, call.spec.sparsity
    return scores.scale * LOG2E, float(scores.softcap), abs(scores.window), threshold, sparsity.tau, sparsity.budget


def splits_of(call: Call, shares: Shares) -> int:
    """Return the number of splits of a launch, with the splits that read open tokens."""
    few, many, long, _, opened, *_ = shares
    most = few if call.blocks < few * long else max(few, many)
    return min(most, call.blocks) + opened


def results_of(call: Call, splits: int) -> tuple:
    """Return a `splits.Results` as a plain tuple, with uninitialised buffers for the partial results of all splits."""
    size = call.sizes
    shape = call.batch * size.H, splits, call.tokens * size.G
    device = call.query.device
    out = torch.empty((*shape, size.V.D), dtype=torch.float32, device=device)
    stats = torch.empty((*shape, 3 if size.SPARSE_V else 2), dtype=torch.float32, device=device)
    return out, stats, skip_counts_of(call.state) if size.SPARSE_V else None


def output_of(call: Call) -> tuple:
    """Return a `merge.Output` as a plain tuple, with uninitialised buffers."""
    size, device = call.sizes, call.query.device
    heads = size.H * size.G
    out = torch.empty((call.batch, call.tokens, heads, size.V.D), dtype=call.query.dtype, device=device)
    lse = torch.empty((call.batch, heads, call.tokens), dtype=torch.float32, device=device)
    return out, lse, call.scores.sinks


def merge(call: Call, results: tuple, output: tuple, shares: Shares, config: Merging) -> None:
    """Merge the splits of each query by their log-sum-exp. `output`: of `output_of`, to be filled."""
    size = call.sizes
    tiles = -(-call.tokens * size.G // config.queries) * (size.V.DP // config.channels)
    launch(
        merge_kernel, (tiles, size.H, call.batch + 1), results, call.rows, output,
        call.blocks, results[0].shape[1], call.tokens, encoded(shares), call.layer, *config[:4], size,
        num_warps=config.warps, enable_fp_fusion=True, **dependent(size),
    )  # fmt: skip
