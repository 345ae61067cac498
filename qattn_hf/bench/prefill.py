"""Prefill: one layer's whole call for a prompt, append and attention, and bf16 SDPA over the same q, k and v."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from qattn_hf.bench import sdpa
from qattn_hf.bench.layers import Heads, make_layer
from qattn_hf.bench.timing import Times, attempt, check_finite, measure, release
from qattn_hf.methods import Method
from qattn_kernels.layer.scores import Scores


class Point(NamedTuple):
    """A point to measure: `batch` rows with prompts of `tokens` tokens."""

    batch: int
    tokens: int


FULL = [Point(1, 1024), Point(16, 1024), Point(4, 4096), Point(1, 16384), Point(1, 32768)]
QUICK = [Point(4, 4096), Point(1, 16384)]
TINY = [Point(1, 96), Point(2, 130)]
FLASH_DIM = 256  # largest head dim of these backends


def rows(
    points: Iterable[Point], methods: dict[str, Method], heads: Heads, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Measure prefills, and yield one row for each point and way.

    Args:
        points: batch and prompt lengths.
        methods: settings of packed caches, by name.
        heads: shape of the layer.
        device: a GPU, or a CPU to test that the bench runs.

    Yields:
        `way`, the shapes, `ms` of one call with its lowest and highest run, and `tops`, or an `error`. A causal pair of
        query and key counts 4 D operations in each head.
    """
    for point in points:
        shape = {"bench": "prefill", **point._asdict(), **heads.row(), "device": device.type}
        names: tuple[str, ...] = ("flash",)
        if device.type == "cuda":
            names = ("flash", "cudnn") if heads.dim <= FLASH_DIM else ("efficient", "math")
        backends = {f"sdpa {name}": sdpa.BACKENDS[name] for name in names}
        ways: dict[str, Any] = {**backends, **methods}
        for name, way in ways.items():
            ours = not isinstance(way, sdpa.Backend)
            timed = partial(_sdpa if isinstance(way, sdpa.Backend) else packed, point, way, heads, device)
            yield {**shape, "way": name, "packed": ours, **attempt(timed, ours=ours)}
            release(device)


def _prompt(point: Point, heads: Heads, device: torch.device) -> list[torch.Tensor]:
    """Make random queries `[B, Hq, T, D]`, keys and values `[B, Hkv, T, D]`."""
    counts = (heads.query, heads.kv, heads.kv)
    shapes = [(point.batch, count, point.tokens, heads.dim) for count in counts]
    return [torch.randn(shape, dtype=heads.dtype, device=device) for shape in shapes]


@torch.no_grad()
def _sdpa(point: Point, backend: sdpa.Backend, heads: Heads, device: torch.device) -> dict[str, Any]:
    run = partial(sdpa.causal, backend, *_prompt(point, heads, device))
    check_finite(run())
    return _result(measure(run, device), point, heads)


@torch.no_grad()
def packed(point: Point, settings: Method, heads: Heads, device: torch.device, unpadded: bool = True) -> dict[str, Any]:
    """Time a call on an empty layer with room for exactly this prompt.

    Args:
        unpadded: whether SDPA may attend in place of the kernels.
    """
    q, k, v = _prompt(point, heads, device)
    layer = make_layer(settings, heads, point.batch, point.tokens, device)
    columns = torch.tensor([[0, point.tokens]], dtype=torch.int32, device=device)
    scores = Scores(heads.dim**-0.5)

    def run() -> torch.Tensor:
        return layer.attend(q, layer.update(k, v)[0], columns, scores, unpadded=unpadded)[0]

    check_finite(run())
    result = _result(measure(run, device, prepare=layer.reset), point, heads)
    return {**result, "impl": layer.spec.impl, "prompt": layer.prompt_by}


def _result(times: Times, point: Point, heads: Heads) -> dict[str, Any]:
    operations = 4 * point.batch * heads.query * point.tokens**2 * heads.dim / 2
    return {
        "ms": round(times.median, 5),
        "ms_low": round(times.low, 5),
        "ms_high": round(times.high, 5),
        "tops": operations / times.median / 1e9,
        "calls": times.runs,
    }
