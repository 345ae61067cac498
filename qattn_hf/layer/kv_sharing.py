"""Layers that attend to the keys and values of an earlier layer, as in Gemma 3n and 4. These are packed once.

The earlier layer may read a call's tokens unquantized before it packs them. A later layer must see the same tokens. So
it restores the state from before the call and writes the same tokens again, while it attends with its own queries. The
second write produces the same bytes.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from qattn_hf.layer.contract import Packed
from qattn_hf.layer.handle import Handle
from qattn_hf.model.device import capturing, compiling
from qattn_kernels.layer.scores import Scores
from qattn_kernels.step import operator


def attend_again(
    layer: Packed, query: torch.Tensor, handle: Handle, span: torch.Tensor, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to the tokens that `layer` wrote from this handle. Arguments and results as in `QAttnLayer.attend`.

    Counters of sparse V, and SinkQ's pool if it is chosen by attention, then belong to the last layer that reads.

    Args:
        query: `[B, Hq, n, D]`, for all of the handle's tokens or the last n. Gemma 4 computes only the last ones.
    """
    assert handle.written is not None
    arena, blocks, past, before, by_sdpa = handle.written
    key, value, last = handle.key, handle.value, query.shape[2]
    if by_sdpa and not bool(layer.state["nonfinite"].any()):
        return _of_prompt(query, key, value, scores), None
    query = with_earlier(query, key.shape[2])
    where = arena, layer._layout, blocks
    fixed = compiling() or capturing()
    # a failure in a copy of the state loses nothing
    with nullcontext() if fixed or arena is not layer.arena else layer.writing(key.shape[2]):
        out, lse = operator.attend_again(query, key, value, span, *where, *scores, past, before)
    return out[:, :, -last:], lse[:, :, -last:]


def with_earlier(query: torch.Tensor, tokens: int) -> torch.Tensor:
    """Prepend zeros to queries `[B, Hq, n, D]` so that they have `tokens` columns."""
    missing = tokens - query.shape[2]
    # padding by zero columns would still copy
    return torch.nn.functional.pad(query, (0, 0, missing, 0)) if missing else query


@torch.no_grad()
def _of_prompt(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Compute causal attention of a prompt's last queries in bf16 or fp16, without writing.

    SDPA returns NaN for every query after a non-finite key or value, where kernels mask the key instead.
    """
    last, tokens = query.shape[2], key.shape[2]
    seen = None
    if 1 < last < tokens:
        seen = torch.ones(last, tokens, dtype=torch.bool, device=query.device).tril(tokens - last)
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, is_causal=last == tokens > 1, scale=scores.scale, enable_gqa=True
    )
