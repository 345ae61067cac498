"""Ways to generate: packed caches by method and decode path, stock caches, and a model without attention."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from qattn_hf.bench.model import FLOOR, counting_cache, register_floor
from qattn_hf.bench.timing import capture, release, synchronize
from qattn_hf.model._compat import CACHE
from qattn_hf.patching.patcher import patch, unpatch
from qattn_hf.recipes.recipe import Recipe, find_recipe

DECODE_PATHS = ("graph", "fused", "compile", "eager")
COMPILED_FLOOR = "floor, compiled and captured"


@dataclass(frozen=True)
class Way:
    """One way to generate: a cache and how decode steps run.

    Attributes:
        name: as users choose it (`--way`).
        decode: the decode path that must run: `graph`, `fused`, `compile`, `eager`, or `captured` for a bare captured
            step.
        packed: whether it is a packed cache.
        prepared: context manager in which the model generates, such as a patch.
        inputs: further arguments of `generate`.
        step: replaces `generate`: returns the milliseconds of a bare step with a given number of rows.
    """

    name: str
    decode: str
    packed: bool
    prepared: Callable[[PreTrainedModel], AbstractContextManager]
    inputs: Callable[[PreTrainedModel], dict[str, Any]] = lambda model: {}
    step: Callable[[PreTrainedModel, int], float] | None = None


def all_ways(recipes: dict[str, Recipe], device: torch.device) -> dict[str, Way]:
    """Return every way that a device supports, by name. A CPU has no CUDA graphs and no compiled steps.

    Args:
        recipes: packed caches by name. On a GPU each is a way with every decode path.
    """
    cuda = device.type == "cuda"
    ways = [
        Way("floor", "eager", False, _floor, lambda model: {CACHE: counting_cache(model)}),
        *(
            Way(name, "captured", False, _floor, step=partial(captured_step, compiled=name == COMPILED_FLOOR))
            for name in (("floor, captured", COMPILED_FLOOR) if cuda else ())
        ),
        *(
            Way(f"{name} {path}", path, True, partial(_packed, recipe=recipe, decode=path))
            for name, recipe in recipes.items()
            for path in (DECODE_PATHS if cuda else ("eager",))
        ),
        Way("DynamicCache", "eager", False, lambda model: nullcontext()),
        Way("DynamicCache, flash", "eager", False, lambda model: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    ]
    if cuda:
        ways.append(Way("StaticCache", "compile", False, _static, lambda model: {"cache_implementation": "static"}))
    return {way.name: way for way in ways}


def default_ways(ways: dict[str, Way]) -> list[Way]:
    """Return the ways measured by default. `StaticCache` is the only default way that waits for `torch.compile`."""
    compiles = ("fused", "compile")
    return [way for way in ways.values() if way.name != COMPILED_FLOOR and not (way.packed and way.decode in compiles)]


@contextmanager
def _packed(model: PreTrainedModel, recipe: Recipe, decode: str) -> Iterator[None]:
    patch(model, recipe=find_recipe(None, recipe, {"decode": decode}))
    try:
        yield
    finally:
        unpatch(model)
        if decode == "compile":
            _forget_compiled(model)


@contextmanager
def _static(model: PreTrainedModel) -> Iterator[None]:
    try:
        yield
    finally:
        for name in ("_cache", "_previous_max_cache_length"):  # `generate` keeps the cache or its size here
            model.__dict__.pop(name, None)
        _forget_compiled(model)


def _forget_compiled(model: PreTrainedModel) -> None:
    """Drop compiled steps, which hold memory, so that the next way compiles its steps."""
    for name in ("_compiled_call", "_last_compile_config"):
        model.__dict__.pop(name, None)
    torch._dynamo.reset()
    gc.collect()
    release(model.device)


@contextmanager
def _floor(model: PreTrainedModel) -> Iterator[None]:
    register_floor()
    with with_attention(model, FLOOR):
        yield


@contextmanager
def with_attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Make a model attend by the function registered as `name`, within a `with` block."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@torch.no_grad()
def captured_step(model: PreTrainedModel, batch: int, replays: int = 50, compiled: bool = False) -> float:
    """Return the median milliseconds of a model's step and argmax, captured in one CUDA graph, synchronized after each.

    The model's attention must need no cache, as in the floor.

    Args:
        compiled: whether `torch.compile` makes the step's kernels.
    """
    device = model.device
    token = torch.zeros(batch, 1, dtype=torch.long, device=device)
    positions, cache = torch.zeros_like(token), counting_cache(model)

    def call() -> None:
        logits = model(token, position_ids=positions, use_cache=True, **{CACHE: cache}).logits
        token.copy_(logits[:, -1:].argmax(-1))

    step = torch.compile(call) if compiled else call
    seconds = []
    for _ in range(3):  # the first calls compile
        step()
    replay = capture([step], device)
    for _ in range(replays):
        began = time.perf_counter()
        replay()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3
