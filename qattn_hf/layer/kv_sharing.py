"""Layers that attend to the keys and values of an earlier layer, as in Gemma 3n and 4: they are packed once.

The earlier layer writes and attends in one call, and what it attends to is not always what it leaves behind: tokens
that the call packed may have been read in the model's precision. So a later layer puts the state back to before the
call and writes the same tokens again, which gives the same bytes, while it attends with queries of its own.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from qattn_hf.layer.contract import Packed
from qattn_hf.layer.handle import Handle
from qattn_hf.model.device import capturing
from qattn_kernels.layer.scores import Scores
from qattn_kernels.step import operator


def attend_again(
    layer: Packed, query: torch.Tensor, handle: Handle, span: torch.Tensor, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to what `layer` wrote from this handle; arguments and results as of `QAttnLayer.attend`.

    Counters of sparse V, and SinkQ's pool where it is chosen by attention, are then those of the last layer that reads.

    Args:
        query: `[B, Hq, n, D]`, of all the handle's tokens or of the last n, where a model leaves the others of a prompt
            out, as Gemma 4 does.
    """
    assert handle.written is not None
    arena, blocks, past, before, by_sdpa = handle.written
    key, value, last = handle.key, handle.value, query.shape[2]
    if by_sdpa and not bool(layer.state["nonfinite"].any()):
        return _of_prompt(query, key, value, scores), None
    query = with_earlier(query, key.shape[2])
    where = arena, layer._layout, blocks
    fixed = torch.compiler.is_compiling() or capturing()
    # in a copy of the state nothing can be lost
    with nullcontext() if fixed or arena is not layer.arena else layer.writing(key.shape[2]):
        out, lse = operator.attend_again(query, key, value, span, *where, *scores, past, before)
    return out[:, :, -last:], lse[:, :, -last:]


def with_earlier(query: torch.Tensor, tokens: int) -> torch.Tensor:
    """Queries `[B, Hq, n, D]` behind as many zeros as make `tokens` of them."""
    missing = tokens - query.shape[2]
    return torch.nn.functional.pad(query, (0, 0, missing, 0)) if missing else query  # which would copy it


@torch.no_grad()
def _of_prompt(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Causal attention of a prompt's last queries in the model's precision; nothing is written.

    SDPA gives NaN to every query behind a key or value that is not finite, which kernels mask instead.
    """
    last, tokens = query.shape[2], key.shape[2]
    seen = None
    if 1 < last < tokens:
        seen = torch.ones(last, tokens, dtype=torch.bool, device=query.device).tril(tokens - last)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, is_causal=last == tokens > 1, scale=scores.scale, enable_gqa=True
    )
