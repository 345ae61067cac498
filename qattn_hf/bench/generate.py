"""Measure `generate` of a whole model: time per token, memory, and set-up time of each way.

Every way generates twice from the same random prompt. The first run is cold and includes compiling and capturing. Each
of its decode steps is timed alone: the call that `generate` makes and an argmax, synchronized. The second run shows
what users see: time to the first token, time of later tokens on the device, and peak memory.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from qattn_hf.bench.model import kv_bytes
from qattn_hf.bench.timing import attempt, release, synchronize
from qattn_hf.bench.ways import Way
from qattn_hf.cache.cache import QAttnCache
from qattn_hf.cache.reporting import report
from qattn_hf.model._compat import CACHE


class Point(NamedTuple):
    """A point to measure: `batch` rows with prompts of `context` tokens."""

    batch: int
    context: int


FULL = [Point(1, 4096), Point(1, 32768), Point(8, 4096)]
QUICK = [Point(1, 4096)]
TINY = [Point(2, 80)]


class Run(NamedTuple):
    """Measurements of one `generate`.

    Attributes:
        gaps: seconds from one token to the next. The first gap begins at the call.
        steps: seconds of each decode step alone, if watched.
        compiled: whether `generate` asked for a compiled call.
        cache: the cache after the run.
        prefill_peak, peak: peak bytes of GPU memory up to the first token, and in total.
    """

    gaps: list[float]
    steps: list[float]
    compiled: bool
    cache: Any
    prefill_peak: int
    peak: int


class Stamps(StoppingCriteria):
    """Stopping criterion that records the time of the call and of each token, and never stops.

    Like `generate` it must not wait for the device, so on a GPU the times are events of the stream."""

    def __init__(self, device: torch.device):
        self.device = device
        self.first_peak = 0
        self._marks: list[Any] = []
        self._mark()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._mark()
        if len(self._marks) == 2:
            self.first_peak = _peak(self.device)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def _mark(self) -> None:
        if self.device.type == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def gaps(self) -> list[float]:
        """Return the seconds from one token to the next. The first gap begins at the call."""
        synchronize(self.device)
        pairs = list(itertools.pairwise(self._marks))
        if self.device.type == "cuda":
            return [before.elapsed_time(now) / 1e3 for before, now in pairs]
        return [now - before for before, now in pairs]


def rows(
    points: Iterable[Point], ways: list[Way], model: PreTrainedModel, device: torch.device, new_tokens: int
) -> Iterator[dict[str, Any]]:
    """Measure `generate`, and yield one row for each point and way.

    Args:
        points: batch and prompt lengths.
        ways: ways from `all_ways`.
        model: unpatched model.
        new_tokens: tokens of each answer.

    Yields:
        `way`, the shapes, `ms_per_token`, `step_ms`, seconds of first token and set-up, bytes of cache and peak, or an
        `error`.
    """
    config = model.config.get_text_config(decoder=True)
    known = config.to_dict()  # as an attribute, a size that differs by layer may raise
    sizes = {key: known.get(key) for key in ("num_hidden_layers", "hidden_size", "num_key_value_heads")}
    shape = {"bench": "generate", **sizes, "dtype": str(model.dtype).removeprefix("torch."), "device": device.type}
    for point in points:
        ids = torch.randint(1, config.vocab_size, point, device=device)
        for way in ways:
            figures = attempt(partial(_measured, model, way, ids, new_tokens), ours=way.packed)
            yield {
                **shape,
                **point._asdict(),
                "new_tokens": new_tokens,
                "way": way.name,
                "packed": way.packed,
                **figures,
            }
            gc.collect()  # models hold reference cycles
            release(device)


def _measured(model: PreTrainedModel, way: Way, ids: torch.Tensor, new_tokens: int) -> dict[str, Any]:
    if way.step is not None:
        with way.prepared(model):
            return {"decode": way.decode, "impl": None, "step_ms": _round(way.step(model, ids.shape[0]))}
    with way.prepared(model):
        cold = generate(model, ids, new_tokens, way.inputs(model), watch=True)
        cold = cold._replace(cache=None)  # free its memory before the second run
        gc.collect()
        release(model.device)
        warm = generate(model, ids, new_tokens, way.inputs(model), watch=False)
    return (
        _ran(warm, way)
        | _figures(cold, warm)
        | {
            "kv_bytes": kv_bytes(warm.cache),
            "prefill_peak_bytes": warm.prefill_peak,
            "peak_bytes": warm.peak,
        }
    )


def generate(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int, inputs: dict[str, Any], watch: bool) -> Run:
    """Generate `new_tokens` greedy tokens after `ids` `[B, T]` and time each. `watch` also times the steps alone.

    Args:
        inputs: further arguments of `model.generate`.

    Raises:
        RuntimeError: the number of tokens or steps differs from the expected one.
    """
    device = ids.device
    steps: list[float] = []
    compiled: list[bool] = []
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    stamps = Stamps(device)
    with decode_calls(model, partial(_timed, seconds=steps, device=device) if watch else None, compiled):
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([stamps]),
            return_dict_in_generate=True,
            **inputs,
        )
    gaps = stamps.gaps()
    if len(gaps) != new_tokens or (watch and len(steps) != new_tokens - 1):
        raise RuntimeError(f"asked for {new_tokens} tokens, saw {len(gaps)} and {len(steps)} decode steps")
    return Run(gaps, steps, bool(compiled), out[CACHE], stamps.first_peak, _peak(device))


@contextmanager
def decode_calls(
    model: PreTrainedModel, wrap: Callable[[Callable], Callable] | None, compiled: list[bool]
) -> Iterator[None]:
    """Make `generate` run its decode steps through `wrap(call)` within a `with` block.

    `generate` takes `model.get_compiled_call(...)` or `model.__call__` by attribute, so attributes of this one model
    suffice. The original call is compiled, not the wrapped one.

    Args:
        compiled: gets an entry when `generate` asks for a compiled call.
    """
    before, get = model.__dict__.get("get_compiled_call"), model.get_compiled_call

    def compiled_call(config: Any) -> Callable:
        model.__dict__.pop("__call__", None)
        call = get(config)
        compiled.append(True)
        return wrap(call) if wrap else call

    model.__dict__["get_compiled_call"] = compiled_call
    if wrap:
        model.__dict__["__call__"] = wrap(model.__call__)
    try:
        yield
    finally:
        model.__dict__.pop("__call__", None)
        model.__dict__.pop("get_compiled_call")
        if before is not None:
            model.__dict__["get_compiled_call"] = before


def _timed(call: Callable, seconds: list[float], device: torch.device) -> Callable:
    def step(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[1] > 1:  # a part of a long prompt
            return call(*args, **kwargs)
        synchronize(device)
        began = time.perf_counter()
        out = call(*args, **kwargs)
        out.logits[:, -1].argmax(-1)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
        return out

    return step


def _ran(run: Run, way: Way) -> dict[str, Any]:
    """Return the decode path and implementation of a run.

    Raises:
        RuntimeError: the decode path that ran differs from the way's path, so its figures would be mislabelled.
    """
    if isinstance(run.cache, QAttnCache):
        data = report(run.cache).to_dict()
        ran, why = {"decode": data["decode"], "impl": data["impl"]}, data.get("decode_reason")
    else:
        ran, why = {"decode": "compile" if run.compiled else "eager", "impl": None}, None
    if ran["decode"] != way.decode:
        raise RuntimeError(f"{way.name} asks for decode={way.decode!r}, but {ran['decode']!r} ran: {why}")
    return ran


def _figures(cold: Run, warm: Run) -> dict[str, Any]:
    """Compute the times of a token and a step: medians over the second half. Extra time of the first half is set-up."""
    token, step = (statistics.median(times[len(times) // 2 :]) for times in (warm.gaps, cold.steps))
    return {
        "ms_per_token": _round(token * 1e3),
        "step_ms": _round(step * 1e3),
        "first_token_s": _round(warm.gaps[0]),
        "first_token_extra_s": _round(cold.gaps[0] - warm.gaps[0]),
        "setup_s": _round(sum(gap - token for gap in cold.gaps[1:])),
        "setup_again_s": _round(sum(gap - token for gap in warm.gaps[1:])),
    }


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _round(value: float) -> float:
    return round(value, 5)
