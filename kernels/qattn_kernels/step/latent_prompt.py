"""Long calls of latent attention (MLA) over expanded keys and values: kernels write the cache, PyTorch's SDPA attends.

In DeepSeek-V3, absorbed keys and values have 576 and 512 channels per head, expanded ones 192 and 128. A step reads the
context once for all heads, so it runs absorbed. A prompt is bound by arithmetic: expanded, it multiplies 3.4 times
fewer numbers, in SDPA's fastest kernels. Queries see the same tokens as in `step.reference`: packed tokens dequantized,
and new tokens in the format's open form."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from qattn_kernels.launch.unpacked_kv import UnpackedKV
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import SHORT_CALL, LayerSpec
from qattn_kernels.layer.step import Step
from qattn_kernels.layout import Row
from qattn_kernels.ops.latent.up import UpProjections
from qattn_kernels.step.prompt import write_and_attend

MOST_MASKED = 2**31  # maximum query-key pairs in a mask; SDPA converts the mask to floating point


def by_expansion(query: torch.Tensor, masked: int, spec: LayerSpec, scores: Scores) -> bool:
    """Return whether `attend_expanded` computes the same as the kernels.

    Args:
        query: `[B, Hq, T, D]`.
        masked: upper bound of a row's tokens after the call, which size the mask. 0 for a first prompt without padding,
            which needs no mask.
        spec: the layer's formats and arithmetic.
        scores: scale, cap, window and sinks of the scores.
    """
    exact = scores.plain and spec.compute.softmax == "exact"
    few = query.shape[0] * query.shape[2] * masked <= MOST_MASKED
    return spec.impl == "triton" and exact and few and query.shape[2] > SHORT_CALL


@torch.no_grad()
def attend_expanded(step: Step, unpadded: bool, up: UpProjections) -> torch.Tensor:
    """Write a long call of latents and attend. Requires `by_expansion`.

    Args:
        step: its query is not absorbed, `[B, Hq, T, Dn + rope]`. Keys are RoPE parts `[B, 1, T, rope]`, values are
            latents `[B, 1, T, R]`.
        unpadded: true if every column of `span` is known to be real.
        up: the layer's up projections.

    Returns:
        `[B, Hq, T, Dv]` in the query's dtype, zeros for padding before a row's first token.

    Raises:
        CapacityError: on a CPU, if the tokens do not fit; nothing was written.
    """
    from qattn_kernels.ops.latent.launch import prefill  # imported here, because it loads Triton

    query, scores = step.query, step.scores
    first = unpadded and step.past == 0
    attend = _first_prompt if first else partial(_masked, block=step.memory.spec.window.block)
    with torch.cuda.device_of(query):
        out = write_and_attend(
            step,
            step.past,
            lambda unpacked: attend(query, unpacked, scores, up),
            lambda call, unpacked: up.expand(prefill(call._replace(query=up.absorb(query)), unpacked)[0]),
        )
        return out.to(query.dtype)  # autocast changes the dtype of products


def _first_prompt(query: torch.Tensor, unpacked: UnpackedKV, scores: Scores, up: UpProjections) -> torch.Tensor:
    """Compute causal attention of a prompt without padding. Token `i` is in slot `i`."""
    tokens = query.shape[2]
    latent, rope = (x[:, :, :tokens] for x in _stored(unpacked, query.dtype))
    key, value = up.expand_kv(latent, rope)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scores.scale)


def _masked(query: torch.Tensor, unpacked: UnpackedKV, scores: Scores, up: UpProjections, block: int) -> torch.Tensor:
    """Compute attention with a mask from the positions of queries and slots. Slots after a row's end are
    uninitialised."""
    row = Row(*unpacked.rows[:, : len(Row._fields)].unbind(1))
    t = torch.arange(query.shape[2], device=query.device) - row.first[:, None]
    end = row.closed * block + row.length - row.open_start + row.count
    real = (t >= 0) & (end > 0)[:, None]  # tokens and the padding after them
    q_pos = torch.where(real, row.length[:, None] + t, -1)
    slots = torch.arange(unpacked.pos.shape[1], device=query.device)
    there = (unpacked.bias == 0.0) & (slots < end[:, None])[:, None]
    latent, rope = (x.masked_fill(~there[..., None], 0.0) for x in _stored(unpacked, query.dtype))
    key, value = up.expand_kv(latent, rope)
    see = there[:, :, None, :] & (unpacked.pos[:, None, :] <= q_pos[:, :, None])[:, None]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=see, scale=scores.scale)
    return out.masked_fill(~real[:, None, :, None], 0.0)  # SDPA's backends disagree on queries that see nothing


def _stored(unpacked: UnpackedKV, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dequantized latents `[B, 1, N, R]` and RoPE parts `[B, 1, N, rope]`."""
    latent, rope = unpacked.v, unpacked.k
    if unpacked.v_scale is not None:
        latent = (latent.mT * unpacked.v_scale[..., None]).to(dtype)
    if unpacked.k_scale is not None:
        rope = (rope * unpacked.k_scale[..., None]).to(dtype)
    return latent, rope
