"""Launch the prefill kernel: choose its compile-time sizes, allocate its outputs."""

from __future__ import annotations

import math
import os

import torch

from qattn_kernels.chip import chip_of
from qattn_kernels.launch.constants import FACTORS_STEP, PrefillSizes, power_of_two
from qattn_kernels.launch.launches import launch
from qattn_kernels.launch.tiles import first_that_fits, prefill_bytes, prefill_tiles
from qattn_kernels.launch.tuned import Prefill
from qattn_kernels.launch.unpacked_kv import UnpackedKV
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec

# Smallest SAS threshold, in log2 units. Weights below the threshold count as 0. `exp2_sas` clamps its argument at -125,
# also for masked scores, so -125 must lie below the threshold.
LEAST_CUT = -80.0
LOG2E = math.log2(math.e)


def _plain(unpacked: UnpackedKV, spec: LayerSpec, scores: Scores) -> bool:
    """Return whether INT8 key products enter an exact softmax without a cap."""
    return unpacked.k_scale is not None and not scores.softcap and spec.compute.softmax == "exact"


def _by_row(unpacked: UnpackedKV, spec: LayerSpec, scores: Scores) -> bool:
    """Return whether scores stay in the unit of their query until the exponent."""
    coded = unpacked.v_channel is not None or (unpacked.v_scale is not None and spec.v.row_weights)
    return coded and _plain(unpacked, spec, scores)


def _block_scales(unpacked: UnpackedKV, spec: LayerSpec, scores: Scores) -> bool:
    """Return whether slots of a closed block share scales; with FP8 values, whether groups of keys do."""
    compute = spec.compute
    if unpacked.v_channel is not None:
        grouped = compute.smooth_q == "none" and compute.k_scale in ("thread", "block")
        return grouped and _plain(unpacked, spec, scores)
    by_block = spec.k.block_scales and spec.v.block_scales
    return by_block and unpacked.k_scale is not None and unpacked.v_scale is not None and not scores.softcap


def with_room(unpacked: UnpackedKV, spec: LayerSpec, scores: Scores) -> UnpackedKV:
    """Return `unpacked` with buffers for its value factors, if values have scales and the prefill uses factors."""
    if unpacked.v_scale is None or _by_row(unpacked, spec, scores):
        return unpacked
    batch, heads, _ = unpacked.bias.shape
    clean = torch.empty(batch * heads, dtype=torch.int32, device=unpacked.bias.device)
    made = torch.empty_like(unpacked.bias), torch.empty_like(unpacked.bias), clean
    return unpacked._replace(factors=(unpacked.v_scale, unpacked.bias, *made))


def _of_values(unpacked: UnpackedKV, spec: LayerSpec, scores: Scores) -> tuple[torch.Tensor, ...]:
    """Return `bias` and `v_factor` of a `kernel.HeadKV`, and `clean` of `value_factors.Factors`."""
    from qattn_kernels.ops.prefill.value_factors import value_factors

    if unpacked.v_scale is None or _by_row(unpacked, spec, scores):
        scale = unpacked.bias if unpacked.v_scale is None else unpacked.v_scale
        return unpacked.bias, scale, unpacked.rows if unpacked.clean is None else unpacked.clean
    if unpacked.factors is not None:
        return unpacked.factors[2:]
    factors, (batch, heads, slots) = with_room(unpacked, spec, scores).factors, unpacked.bias.shape
    launch(
        value_factors, (batch * heads,),
        factors, unpacked.rows, heads, slots, BLOCK=spec.window.block, STEP=FACTORS_STEP, enable_fp_fusion=True,
    )  # fmt: skip
    assert factors is not None
    return factors[2:]


def _tail(config: Prefill, block: int, rounded_once: bool) -> int:
    """Return the slots per tile where positions are compared: at most two blocks, or one block below 64 slots.

    Two blocks of 32 slots would take `kivi` 7 % longer.

    `rounded_once`: INT8 weights come rounded (`row_weights`). A larger tile has a larger maximum, which leaves fewer
    levels to the other weights: with tiles of 128, `int_flash:bits=4` failed `test_every_call_of_a_trained_model`."""
    return min(config.tail, 64 if rounded_once else config.tail, block if block < 64 else 2 * block)


def _value_dim(unpacked: UnpackedKV) -> int:
    """Return the head dimension of values. Quantized values are stored transposed."""
    coded = unpacked.v_scale is not None or unpacked.v_channel is not None
    return unpacked.v.shape[2] if coded else unpacked.v.shape[3]


def _config(q: torch.Tensor, unpacked: UnpackedKV, spec: LayerSpec, scores: Scores) -> Prefill:
    """Return the first launch configuration that fits the GPU's shared memory."""
    chip, width = chip_of(q.device), q.element_size()
    coded = "int8" if unpacked.v_scale is not None else "fp8" if unpacked.v_channel is not None else None
    tiles = prefill_tiles(chip, coded or ("float" if width == 4 else "half"), max(q.shape[3], _value_dim(unpacked)))
    return first_that_fits(tiles, lambda one: prefill_bytes(_sizes(q, unpacked, spec, scores, one), width, chip), chip)


def _sizes(q: torch.Tensor, unpacked: UnpackedKV, spec: LayerSpec, scores: Scores, config: Prefill) -> PrefillSizes:
    """Return the compile-time sizes of a call with the tiles of `config`."""
    compute, block = spec.compute, spec.window.block
    hq, dim, heads, dim_v = q.shape[1], q.shape[3], unpacked.k.shape[1], _value_dim(unpacked)
    k_int8, v_int8, v_fp8 = (x is not None for x in (unpacked.k_scale, unpacked.v_scale, unpacked.v_channel))
    dp, dvp = (max(16 if not (k_int8 or v_int8 or v_fp8) else 32, power_of_two(d)) for d in (dim, dim_v))
    by_row = _by_row(unpacked, spec, scores)
    return PrefillSizes(
        BM=compute.block_q if k_int8 and compute.q_scale == "block" else config.queries,
        BN=min(config.bn, 2 * block),
        TAIL=_tail(config, block, by_row and v_int8),
        STAGES=config.stages,
        HQ=hq,
        G=hq // heads,
        D=dim,
        DV=dim_v,
        DP=dp,
        DVP=dvp,
        BLOCK=block,
        BLOCK_SCALES=_block_scales(unpacked, spec, scores),
        K_INT8=k_int8,
        V_INT8=v_int8,
        Q_LEVELS=float(compute.qk_levels),
        V_FP8=v_fp8,
        Q_GROUP=compute.q_scale if k_int8 else "block",
        SMOOTH_K=unpacked.k_mean is not None,
        SMOOTH_Q="none" if unpacked.shift is None else compute.smooth_q,
        SMOOTH_V=unpacked.v_mean is not None,
        BY_ROW=by_row,
        RAISED=compute.round_sum,
        LOCAL_WINDOW=abs(scores.window),
        CHUNKS=scores.window < 0,
        SOFTCAP=scores.softcap != 0,
        SAS=compute.softmax == "sas",
        SINK_LOGITS=scores.sinks is not None,
        PLAIN=os.environ.get("TRITON_INTERPRET") == "1",
    )


def prefill(
    q: torch.Tensor, unpacked: UnpackedKV, spec: LayerSpec, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of a long call over unpacked keys and values.

    `ops/prefill/reference.py` is the specification. INT8 codes are multiplied as integers, unquantized keys and values
    in the query's dtype. These details differ from the reference:

    - `sas_threshold` cuts relative to the maximum of the kernel's tiles so far.
    - `p_scale: tile` has no kernel.
    - Weights have 127 levels for any `spec.compute`.
    - `round_sum` acts where the softmax is exact and has no cap; otherwise row sums use unrounded weights.

    Args:
        q: `[B, Hq, T, D]`, bf16, fp16 or fp32, columns in the model's order; `unpacked.rows` tells which are real.
        unpacked: contiguous tensors; masked slots hold finite values.
        spec: the layer's formats and arithmetic.
        scores: scale, cap, window and sinks of the scores.

    Returns:
        Output `[B, Hq, T, Dv]` in the query's dtype, stored as `[B, T, Hq, Dv]`, and fp32 log-sum-exp `[B, Hq, T]`.
            Padding before a row's first token has zeros in both. A query that sees nothing has zeros and -inf.
    """
    from qattn_kernels.ops.prefill.coded import with_codes
    from qattn_kernels.ops.prefill.kernel import attend

    q = q if q.stride(3) == 1 else q.contiguous()
    unpacked = with_codes(q, unpacked, spec, scores.scale)
    config = _config(q, unpacked, spec, scores)
    sizes = _sizes(q, unpacked, spec, scores, config)
    batch, hq, tokens = q.shape[:3]
    out = torch.empty((batch, tokens, hq, sizes.DV), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, hq, tokens), dtype=torch.float32, device=q.device)
    bias, v_factor, clean = _of_values(unpacked, spec, scores)
    k_scale = unpacked.bias if unpacked.k_scale is None else unpacked.k_scale
    sinks = lse if scores.sinks is None else scores.sinks
    extra = tuple(
        unpacked.bias if x is None else x
        for x in (unpacked.k_mean, unpacked.q_mean, unpacked.shift, unpacked.v_channel, unpacked.v_mean)
    )
    cut = max(spec.compute.sas_threshold * LOG2E, LEAST_CUT)
    launch(
        attend, (batch * hq * (-(-tokens // sizes.BM) + 1),),  # token blocks, then padding blocks: at most one more
        (q, q.stride()[:3]), (unpacked.k, k_scale, unpacked.v, bias, v_factor, unpacked.pos), clean, unpacked.rows,
        sinks, extra, out, lse, tokens, unpacked.bias.shape[2], (scores.scale, scores.softcap * LOG2E, cut), C=sizes,
        num_warps=config.warps * max(1, sizes.BM // 64), num_stages=config.stages, enable_fp_fusion=True,
    )  # fmt: skip
    return out.transpose(1, 2), lse
