"""Measure requests of mixed lengths in continuous batching, each way over a pool of the same bytes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel

from qattn_hf.bench.timing import attempt, release
from qattn_hf.bench.ways import Way, all_ways
from qattn_hf.generate.continuous.model_pages import pages_of_model
from qattn_hf.model.heads import head_sizes
from qattn_hf.recipes.recipe import Recipe

PAGE = 64  # tokens of an unpacked page; most methods have pages of this size
WARM_UP = 4  # requests that are answered before timing begins


class Point(NamedTuple):
    """A load: `requests` prompts of up to `longest` tokens, answered within `kv_mib` MiB of cache.

    Lengths are drawn evenly on a log scale, from a sixteenth of the longest on. An answer has up to an eighth of
    `longest` tokens. Every way gets the same lengths. A forward has at most `batch_tokens` tokens of all requests, as
    many as Transformers chooses by default."""

    kv_mib: int
    requests: int
    longest: int
    batch_tokens: int | None = None


FULL = [Point(4 * 1024, 256, 2048)]
QUICK = [Point(1024, 64, 1024)]
TINY = [Point(1, 6, 128)]


def rows(
    loads: Iterable[Point], recipes: dict[str, Recipe], model: PreTrainedModel, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Answer all requests of each load, and yield one row for each load and way.

    Args:
        loads: the loads to measure.
        recipes: recipes of packed pages, by name.
        model: unpatched model.
        device: device of the model.

    Yields:
        `way`, the load, `blocks` of `page_tokens` and `kv_bytes` of the pool, the most requests `held` at once,
        `seconds`, and `tokens_per_s` of answers, or an `error`.
    """
    known = all_ways(recipes, device)
    for load in loads:
        shape = {"bench": "requests", "device": device.type, **load._asdict()}
        stock = f"model precision, {model.config._attn_implementation}"
        measured = {stock: partial(_stock, model, load)}
        measured |= {name: partial(_packed, model, known[f"{name} eager"], load) for name in recipes}
        for name, timed in measured.items():
            ours = name != stock
            yield {**shape, "way": name, "packed": ours, **attempt(timed, ours=ours)}
            release(device)


def _stock(model: PreTrainedModel, load: Point) -> dict[str, Any]:
    text = model.config.get_text_config(decoder=True)
    sizes = [head_sizes(model.config, i) for i in range(text.num_hidden_layers)]
    block = sum(size.kv * (size.dim + size.v_dim) for size in sizes) * PAGE * model.dtype.itemsize
    return _answered(model, load, PAGE, block, load.requests)


def _packed(model: PreTrainedModel, way: Way, load: Point) -> dict[str, Any]:
    with way.prepared(model):
        pages = pages_of_model(model)
        impl = " and ".join(sorted({layout.spec.impl for layout in pages.every}))
        row, room = pages.request_bytes(), load.kv_mib * 2**20
        slots = min(load.requests, int(pages.share_of_rows * room / row))
        return {"impl": impl, **_answered(model, load, pages.block, pages.block_bytes, slots, row)}


def _answered(
    model: PreTrainedModel, load: Point, page: int, block_bytes: int, slots: int, row: int = 0
) -> dict[str, Any]:
    """Return figures of one run over blocks of `page` tokens, where each of `slots` requests also has `row` bytes."""
    from transformers import ContinuousBatchingConfig

    room = load.kv_mib * 2**20
    blocks = (room - slots * row) // block_bytes - 2  # Transformers keeps two blocks for itself
    pool = {
        "page_size": page,
        "num_blocks": blocks,
        "max_requests_per_batch": slots,
        "max_batch_tokens": load.batch_tokens,
        "allow_block_sharing": False,
    }
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=load.longest // 8)
    asked = _asked(load, model.config.get_text_config(decoder=True).vocab_size)
    with model.continuous_batching_context_manager(
        generation, continuous_batching_config=ContinuousBatchingConfig(**pool)
    ) as manager:
        _serve(manager, [(ids, 2) for ids, _ in asked[:WARM_UP]])  # compiles kernels
        began = time.perf_counter()
        held = _serve(manager, asked)
        seconds = time.perf_counter() - began
    tokens = sum(new for _, new in asked)
    figures = {"page_tokens": page, "blocks": blocks, "kv_bytes": (blocks + 2) * block_bytes + slots * row}
    return {**figures, "held": held, "seconds": round(seconds, 3), "tokens_per_s": round(tokens / seconds, 1)}


def _serve(manager: Any, asked: list[tuple[list[int], int]]) -> int:
    """Answer all requests. Returns the most requests that were held at once."""
    for ids, new in asked:
        manager.add_request(ids, max_new_tokens=new)
    held, left = 0, len(asked)
    while left:
        done = manager.get_result(timeout=0.05)
        if done is not None and done.error is not None:
            raise RuntimeError(done.error)
        left -= done is not None
        held = max(held, len(manager.batch_processor.scheduler.active_requests))
    return held


def _asked(load: Point, vocabulary: int) -> list[tuple[list[int], int]]:
    """Draw prompts, and the number of tokens of each answer."""
    rng = random.Random(0)

    def length(most: int) -> int:
        return max(1, round(most * 2 ** -rng.uniform(0, 4)))

    prompts = [[rng.randrange(vocabulary) for _ in range(length(load.longest))] for _ in range(load.requests)]
    return [(prompt, length(load.longest // 8)) for prompt in prompts]
