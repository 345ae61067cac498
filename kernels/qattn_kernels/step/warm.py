"""Compile the kernels of layers in parallel threads, before a call needs them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from qattn_kernels.launch.launches import Launch, collected, compile_launch, expect
from qattn_kernels.layer.arena import Layout, empty_arena
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import SHORT_CALL, LayerSpec
from qattn_kernels.layer.step import Arena, Step
from qattn_kernels.layout import Geometry
from qattn_kernels.step.operator import compute

THREADS = 8  # maximum: the compiler runs outside the GIL, the rest inside
Calls = tuple[tuple[int, int, int], ...]  # rows, tokens and earlier blocks of each
# Together these launch all kernels of `generate`: a prompt, steps of few to many rows (which merge many to few splits),
# and a later prompt.
CALLS: Calls = ((1, SHORT_CALL + 1, 0), (1, 1, 1), (16, 1, 1), (64, 1, 1), (1, SHORT_CALL + 1, 1))


class LayerShape(NamedTuple):
    """Sizes that the kernels of a layer are compiled for.

    Attributes:
        spec: the layer's formats and arithmetic.
        heads, kv_heads, dim: query heads, KV heads and head dimension.
        dtype, device: of the model.
        softcap: whether scores are capped.
        window: tokens of the sliding window as in `Scores`, `-n` for chunks, 0 without a window.
        v_dim: head dimension of values, if not `dim`. Queries of latent attention have `dim + v_dim` channels.
    """

    spec: LayerSpec
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    softcap: bool = False
    window: int = 0
    v_dim: int | None = None


def launches(shape: LayerShape, calls: Calls = CALLS) -> list[Launch]:
    """Return the launches of `calls` in order, without launching. Allocates memory for calls of few tokens.

    Calls of more than `SHORT_CALL` tokens launch the same kernels, whatever their length."""
    found: list[Launch] = []
    v_dim = shape.v_dim or shape.dim
    q_dim = shape.dim + v_dim if shape.spec.latent else shape.dim
    for rows, asked, past in calls:
        tokens = min(asked, SHORT_CALL + 1)
        geometry = Geometry(rows, shape.kv_heads, shape.dim, v_dim, 2, shape.dtype)
        layout = Layout(geometry, shape.spec)
        arena = empty_arena(layout, shape.device)
        q, k, v = (
            torch.empty(rows, tokens, heads, dim, dtype=shape.dtype, device=shape.device).transpose(1, 2)
            for heads, dim in ((shape.heads, q_dim), (shape.kv_heads, shape.dim), (shape.kv_heads, v_dim))
        )
        span = torch.zeros(rows, 2, dtype=torch.int32, device=shape.device)
        scores = Scores(shape.dim**-0.5, float(shape.softcap), shape.window)
        step = Step(q, k, v, span, Arena(arena, layout, layout.encode()), scores, past)
        found += collected(partial(compute, step))
    return found


def variants(shapes: Iterable[LayerShape], calls: Calls = CALLS) -> list[tuple[Launch, torch.device]]:
    """Return one launch, with its device, of each variant of a kernel that `calls` launch for these layer shapes."""
    found = ((one, shape.device) for shape in dict.fromkeys(shapes) for one in launches(shape, calls))
    return list({(one.variant(), device): (one, device) for one, device in found}.values())


def warm(shapes: Iterable[LayerShape], calls: Calls = CALLS) -> list[Future]:
    """Start to compile in threads what `calls` launch for these layer shapes. A call that needs a kernel waits for it.

    Returns:
        One future per variant of a kernel. A failed one is silent: the call that needs it compiles it again.
    """
    tasks = variants(shapes, calls)
    if not tasks:
        return []
    pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="qattn-compile")
    futures = [expect(one.kernel, pool.submit(_compile, one, device)) for one, device in tasks]
    pool.shutdown(wait=False)
    return futures


def _compile(one: Launch, device: torch.device) -> None:
    with torch.cuda.device(device):
        compile_launch(one)
