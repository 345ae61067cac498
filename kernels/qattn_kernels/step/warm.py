"""Kernels of a layer compiled side by side in threads, before a call needs them."""

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
from qattn_kernels.layout import Geometry
from qattn_kernels.step.operator import compute

THREADS = 8  # at most: the compiler's own work is outside Python's lock, the rest is not
# Rows, tokens, and blocks before them, of calls that launch all kernels of `generate`: a prompt, a step of few and of
# many rows (which merge few parts of a context or many), and a later prompt.
CALLS = ((1, SHORT_CALL + 1, 0), (1, 1, 1), (64, 1, 1), (1, SHORT_CALL + 1, 1))


class LayerShape(NamedTuple):
    """What the kernels of a layer are compiled for.

    Attributes:
        heads, kv_heads, dim: query and KV heads, and their dimension.
        v_dim: of values, if not `dim`; a query of latent attention has both.
        softcap: whether scores are capped.
        window: as in `Scores`: tokens of the layer's sliding window, `-n` for chunks; 0 without.
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


def launches(shape: LayerShape) -> list[Launch]:
    """What `CALLS` launch, in order; nothing is launched. Memory is allocated for calls of few tokens."""
    found: list[Launch] = []
    v_dim = shape.v_dim or shape.dim
    q_dim = shape.dim + v_dim if shape.spec.latent else shape.dim
    for rows, tokens, past in CALLS:
        geometry = Geometry(rows, shape.kv_heads, shape.dim, v_dim, 2, shape.dtype)
        layout = Layout(geometry, shape.spec)
        arena = empty_arena(layout, shape.device)
        q, k, v = (
            torch.empty(rows, tokens, heads, dim, dtype=shape.dtype, device=shape.device).transpose(1, 2)
            for heads, dim in ((shape.heads, q_dim), (shape.kv_heads, shape.dim), (shape.kv_heads, v_dim))
        )
        span = torch.zeros(rows, 2, dtype=torch.int32, device=shape.device)
        scores = Scores(shape.dim**-0.5, float(shape.softcap), shape.window)
        found += collected(partial(compute, q, k, v, span, arena, layout, scores, past))
    return found


def warm(shapes: Iterable[LayerShape]) -> list[Future]:
    """Begin to compile the kernels of layers of these shapes, in threads; a call that needs one waits for it.

    Returns:
        a future for each kernel. One that fails says nothing: the call that needs the kernel compiles it itself.
    """
    tasks: dict[tuple, list[Launch]] = {}
    for shape in dict.fromkeys(shapes):
        for one in launches(shape):  # variants of one function in one task: Triton keeps them in one table
            tasks.setdefault((one.kernel, shape.device), []).append(one)
    if not tasks:
        return []
    pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), thread_name_prefix="qattn-compile")
    futures = [expect(kernel, pool.submit(_compile, variants, device)) for (kernel, device), variants in tasks.items()]
    pool.shutdown(wait=False)
    return futures


def _compile(variants: list[Launch], device: torch.device) -> None:
    with torch.cuda.device(device):
        for one in variants:
            compile_launch(one)
