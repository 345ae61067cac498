"""Tokens per second at equal memory: decode steps of a whole model with as many rows as fit into a number of bytes.

Caches are filled with random numbers, without prompts. `SDPA cudnn, captured` is an upper bound for unpacked keys and
values. It is a captured step of the model whose attention uses a preallocated cache of exactly the context, and
PyTorch's SDPA with cuDNN.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from qattn_hf.bench import sdpa
from qattn_hf.bench.generate import Run, generate
from qattn_hf.bench.layers import Heads
from qattn_hf.bench.model import kv_bytes
from qattn_hf.bench.timing import attempt, release
from qattn_hf.bench.ways import Way, all_ways, captured_step, with_attention
from qattn_hf.cache.cache import QAttnCache
from qattn_hf.cache.reporting import report
from qattn_hf.layer.filled import fill
from qattn_hf.model._compat import CACHE
from qattn_hf.model.heads import head_sizes
from qattn_hf.recipes.recipe import Recipe

NEW_TOKENS = 16
STOCK = "DynamicCache, flash"
BEST = "SDPA cudnn, captured"
SDPA = "qattn_bench_sdpa"


class Point(NamedTuple):
    """A point to measure: `kv_mib` MiB of keys and values, in rows of `context` tokens."""

    kv_mib: int
    context: int


FULL = [Point(40 * 1024, 8192), Point(40 * 1024, 32768)]
QUICK = [Point(4 * 1024, 8192)]
TINY = [Point(1, 128)]


def rows(
    points: Iterable[Point], recipes: dict[str, Recipe], model: PreTrainedModel, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Measure decode steps with as many rows as each cache can hold, and yield one row for each point and way.

    Args:
        points: bytes of keys and values, and context lengths.
        recipes: recipes of packed caches, by name.
        model: unpatched model.
        device: a GPU, or a CPU to test that the bench runs.

    Yields:
        `way`, the shapes, `batch` rows that fit, their `kv_bytes`, `ms_per_token` of all rows, and `tokens_per_s`, or
        an `error`.
    """
    known = all_ways(recipes, device)
    path = "graph" if device.type == "cuda" else "eager"
    ways = [known[STOCK], *(known[f"{name} {path}"] for name in recipes)]
    shape = {"bench": "throughput", "num_hidden_layers": len(heads_of(model)), "device": device.type}
    for point in points:
        measured = {BEST: partial(_best_sdpa, model, point)} if device.type == "cuda" else {}
        measured |= {way.name: partial(_generated, model, way, point) for way in ways}
        for name, timed in measured.items():
            packed = name not in (BEST, STOCK)
            yield {**shape, **point._asdict(), "way": name, "packed": packed, **attempt(timed, ours=packed)}
            gc.collect()  # models hold reference cycles
            release(device)


def heads_of(model: PreTrainedModel) -> list[Heads]:
    """Return the shape of each attention layer of a model."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    sizes = [head_sizes(model.config, i) for i in range(count)]
    return [Heads(size.query, size.kv, size.dim, model.dtype) for size in sizes]


def _rows_that_fit(point: Point, row_bytes: int) -> int:
    count = point.kv_mib * 2**20 // row_bytes
    if count == 0:
        raise RuntimeError(f"one row of {point.context} tokens takes {row_bytes} bytes, more than there are")
    return count


def _figures(batch: int, kv_bytes: int, ms: float) -> dict[str, Any]:
    return {
        "batch": batch,
        "kv_bytes": kv_bytes,
        "ms_per_token": round(ms, 5),
        "tokens_per_s": round(batch / ms * 1e3, 1),
    }


def _generated(model: PreTrainedModel, way: Way, point: Point) -> dict[str, Any]:
    """Measure `generate` with a cache that holds all but the last token of each row."""
    with way.prepared(model):
        make = _packed_cache if way.packed else _stock_cache
        batch = _rows_that_fit(point, kv_bytes(make(model, 1, point.context)))
        cache = make(model, batch, point.context)
        ids = torch.randint(1, 97, (batch, point.context), device=model.device)
        run: Run = generate(model, ids, NEW_TOKENS, {CACHE: cache}, watch=False)
    ran = {"decode": report(cache).to_dict()["decode"], "impl": cache.packed[0].spec.impl} if way.packed else {}
    if way.packed and ran["decode"] != way.decode:
        raise RuntimeError(f"{way.name} asks for decode={way.decode!r}, but {ran['decode']!r} ran")
    ms = statistics.median(run.gaps[len(run.gaps) // 2 :]) * 1e3
    return {**ran, **_figures(batch, kv_bytes(cache), ms)}


def _packed_cache(model: PreTrainedModel, batch: int, context: int) -> QAttnCache:
    """Make a cache of a patched model for `context` tokens and an answer, with all but the last token filled in."""
    cache = QAttnCache.for_model(model, max_cache_len=context + NEW_TOKENS)
    for layer, heads in zip(cache.layers, heads_of(model), strict=True):
        nothing = torch.empty(batch, heads.kv, 0, heads.dim, dtype=heads.dtype, device=model.device)
        layer.lazy_initialization(nothing, nothing)
        fill(layer, context - 1)
    return cache


def _stock_cache(model: PreTrainedModel, batch: int, context: int) -> DynamicCache:
    """Make a `DynamicCache` with random keys and values of all but the last token."""
    cache = DynamicCache(config=model.config)
    for i, heads in enumerate(heads_of(model)):
        shape = batch, heads.kv, context - 1, heads.dim
        cache.update(*(torch.randn(shape, dtype=heads.dtype, device=model.device) for _ in range(2)), i)
    return cache


def _best_sdpa(model: PreTrainedModel, point: Point) -> dict[str, Any]:
    """Measure a captured step with preallocated unpacked keys and values."""
    shapes = heads_of(model)
    row_bytes = sum(heads.bytes_per_token() for heads in shapes) * point.context
    batch = _rows_that_fit(point, row_bytes)
    with with_sdpa(model, shapes, batch, point.context, sdpa.BACKENDS["cudnn"]):
        ms = captured_step(model, batch)
    return {"decode": "captured", "impl": None, **_figures(batch, batch * row_bytes, ms)}


@contextmanager
def with_sdpa(
    model: PreTrainedModel, shapes: list[Heads], batch: int, context: int, backend: sdpa.Backend
) -> Iterator[list[sdpa.Cache]]:
    """Make a model attend by a step of an `sdpa.Cache` in each layer, within a `with` block."""
    caches = [sdpa.Cache(heads, batch, context, model.device) for heads in shapes]

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        step = caches[module.layer_idx].step(backend, query, key, value)
        return step().transpose(1, 2).contiguous(), None

    AttentionInterface.register(SDPA, attend)
    with with_attention(model, SDPA):
        yield caches
