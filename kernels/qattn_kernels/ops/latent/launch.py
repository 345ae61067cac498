"""Launch latent attention: a short call reads the stored blocks, a long one reads unpacked keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch

from qattn_kernels.chip import chip_of
from qattn_kernels.formats.contract import jit_of
from qattn_kernels.launch.call import Call
from qattn_kernels.launch.constants import LATENT_COLUMNS, Sizes
from qattn_kernels.launch.launches import launch
from qattn_kernels.launch.tuned import tuned_for
from qattn_kernels.launch.unpacked_kv import UnpackedKV, tensors
from qattn_kernels.ops.decode.launch import FEW, Merging, merge, output_of, results_of, scoring, splits_of
from qattn_kernels.ops.decode.table import encoded, shares_of
from qattn_kernels.ops.latent.kernel import Forms, latent_decode_kernel, latent_prefill_kernel

MERGE_WARPS = 4


class Config(NamedTuple):
    """How to launch a kernel.

    Attributes:
        warps: of a program.
        stages: loads in flight.
        programs: that a multiprocessor runs at once.
    """

    warps: int
    stages: int
    programs: int


def _config(size: Sizes, forms: Forms) -> Config:
    """Choose a configuration by the registers of the sums and the shared memory of queries and latents.

    An fp32 tile fills half of Hopper's shared memory before it is divided, so only one is in flight.
    """
    wide = forms.WIDE and not forms.V_CODES
    return Config(8 if size.Q * size.V.DP >= 64 * 128 else 4, 1 if wide else 2, 1 if size.V.DP > 256 else 2)


def _forms(call: Call) -> Forms:
    return Forms(call.spec.k.integer, call.spec.v.integer, call.query.dtype == torch.float32)


def decode(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in a short call, after its append, and commit the row lengths. Results are as in `ops.decode.launch`."""
    size, spec, batch, tokens = call.sizes, call.spec, call.batch, call.tokens
    forms, rows, chip = _forms(call), tokens * size.G, chip_of(call.key.device)
    config = _config(size, forms)
    tiles = -(-rows // size.Q)
    places = chip.multiprocessors * config.programs
    tuned = tuned_for(chip).decode
    # Fewer blocks a program, and waves that count open tokens, were not measured with latents. Large splits were not
    # either, but apply.
    shares = shares_of(places, batch * tiles, size.BLOCK, 0, False, tuned)._replace(least=tuned.least, open=size.OPEN)
    results = results_of(call, splits_of(call, shares))
    launch(
        latent_decode_kernel, (batch, tiles, results[0].shape[1]),
        (call.query, call.query.stride()[:3]), call.rows, call.layer, results, call.blocks, tokens,
        scoring(call), encoded(shares), config.stages, jit_of(spec.k).get, jit_of(spec.v).get, forms, size,
        num_warps=config.warps, enable_fp_fusion=True,
    )  # fmt: skip
    output = output_of(call)
    merge(call, results, output, shares, Merging(FEW, FEW, 1, size.V.DP, MERGE_WARPS))
    return output[0].transpose(1, 2), output[1]


def prefill(call: Call, unpacked: UnpackedKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in a long call over its unpacked keys and values.

    Returns:
        Output `[B, Hq, T, Dv]` in the query's dtype, stored as `[B, T, Hq, Dv]`, and fp32 log-sum-exp `[B, Hq, T]`.
        Padding before a row's first token gets zeros in both. A query that sees no token gets zeros and -inf.
    """
    most, query, sinks = max(LATENT_COLUMNS), call.query, call.scores.sinks
    size = call.sizes._replace(Q=most, N=most)
    batch, heads, tokens = query.shape[:3]
    out = torch.empty((batch, tokens, heads, size.V.D), dtype=query.dtype, device=query.device)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=query.device)
    forms = _forms(call)
    config = _config(size, forms)
    launch(
        latent_prefill_kernel, (-(-tokens * size.G // size.Q), batch),
        (query, query.stride()[:3]), call.rows, tensors(unpacked), lse if sinks is None else sinks, out, lse, tokens,
        scoring(call), sinks is not None, config.stages, forms, size,
        num_warps=config.warps, enable_fp_fusion=True,
    )  # fmt: skip
    return out.transpose(1, 2), lse
