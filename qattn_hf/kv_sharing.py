"""Layers that attend to the keys and values of an earlier layer, as in Gemma 3n and 4: they are packed once.

The earlier layer writes and attends in one call, and what it attends to is not always what it leaves behind: tokens
that the call packed may have been read in the model's precision. So a later layer puts the state back to before the
call and writes the same tokens again, which gives the same bytes, while it attends with queries of its own.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from qattn_hf.device import capturing
from qattn_hf.handle import Handle
from qattn_kernels.layer.arena import Layout, views
from qattn_kernels.layer.scores import Scores
from qattn_kernels.step import operator
from qattn_kernels.step.operator import put_back
from qattn_kernels.step.prompt import attend_prompt, by_sdpa

if TYPE_CHECKING:
    from qattn_hf.layer import QAttnLayer


def reaching(handle: Handle, query: torch.Tensor, span: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[B, Hq, T, D]` and span of a later layer as the handle's own layer takes them.

    They go to the device of the keys, since an `accelerate` device map may put the layers on different ones. Where a
    model computes the last tokens of a prompt alone, as Gemma 4 does, zeros stand for the queries before them.
    """
    device, tokens = handle.key.device, handle.key.shape[2]
    query = torch.nn.functional.pad(query.to(device), (0, 0, tokens - query.shape[2], 0))
    return query, span.to(device)


def attend_again(
    layer: QAttnLayer, query: torch.Tensor, handle: Handle, span: torch.Tensor, scores: Scores, unpadded: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to what `layer` wrote from this handle; arguments and results as of `QAttnLayer.attend`.

    Counters of sparse V, and SinkQ's pool where it is chosen by attention, are then those of the last layer that reads.
    """
    written, key, value = handle.written, handle.key, handle.value
    assert written is not None
    arena, blocks, past, before = written
    sizes = scores.scale, scores.softcap, scores.window, scores.sinks
    fixed = torch.compiler.is_compiling() or capturing()
    # in a copy of the state nothing can be lost
    with nullcontext() if fixed or arena is not layer.arena else layer.writing(query.shape[2]):
        if not fixed and unpadded and past == 0 and by_sdpa(query, key, value, layer.spec, scores):
            put_back(arena, before)
            state = views(arena, Layout(layer.geometry, layer.spec))
            return attend_prompt(query, key, value, span, state, layer.spec, scores), None
        where = arena, layer._layout, blocks
        out, lse = operator.attend_again(query, key, value, span, *where, *sizes, past, before)
    return out, lse
