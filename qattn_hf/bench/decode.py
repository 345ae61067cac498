"""Decode attention: one layer's whole step for one new token, with packed caches, bf16 SDPA and other libraries.

Steps run inside one CUDA graph of many steps, as in a captured decode step of a model. A packed layer appends the
token, quantizes full blocks, attends and merges splits. SDPA and peers write key and value into place and attend over
exactly the context. Each step of the graph works on buffers that the L2 cache has already evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from qattn_hf.bench import peers, sdpa
from qattn_hf.bench.layers import Heads, bookkeeping, bytes_read, make_layer
from qattn_hf.bench.timing import Times, Work, attempt, capture, check_finite, measure, release, working_sets
from qattn_hf.layer.filled import fill
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.methods import Method
from qattn_kernels.layer.scores import Scores

SDPA_STEPS = 16  # least number in a graph, so that launching it is a small part of its time
SETTLING = 4  # discarded measurements: the first three on an H100 are 1 us a step faster than later ones
ROOM = 4  # capacity over context, for the points that measure the cost of spare capacity


class Point(NamedTuple):
    """A point to measure: `batch` rows of `context` cached tokens, in packed caches of `room` times that capacity."""

    batch: int
    context: int
    room: int = 1


FULL = [
    *(Point(b, c) for b in (1, 4, 16, 64) for c in (512, 2048, 8192, 32768)),
    *(Point(1, 4096), Point(64, 4096), Point(1, 131072)),
    *(Point(1, 4096, ROOM), Point(16, 8192, ROOM), Point(64, 4096, ROOM)),
]
QUICK = [Point(1, 4096), Point(1, 32768), Point(16, 8192), Point(64, 4096), Point(64, 4096, ROOM)]
TINY = [Point(1, 128), Point(2, 192), Point(1, 128, ROOM)]


def rows(
    points: Iterable[Point],
    methods: dict[str, Method],
    heads: Heads,
    device: torch.device,
    libraries: dict[str, peers.Library] | None = None,
) -> Iterator[dict[str, Any]]:
    """Measure decode steps, and yield one row for each point and way.

    Args:
        points: batch and context lengths.
        methods: settings of packed caches, by name.
        heads: shape of the layer.
        device: a GPU, or a CPU to test that the bench runs.
        libraries: peers to measure, by name, such as `peers.installed()`.

    Yields:
        `way`, the shapes, `ms` of one step with its lowest and highest run, `kv_bytes` read and `gb_per_s`, or an
        `error`. The row of a peer has `peer` true, `difference` from fp64, its best `choice`, and `writer`.
    """
    settled = device.type != "cuda"
    for point in points:
        shape = {"bench": "decode", **point._asdict(), **heads.row(), "device": device.type}
        for kind, name, timed in _ways(point, methods, heads, device, libraries or {}):
            for _ in range(0 if settled else SETTLING):
                attempt(timed, ours=kind["packed"])
            settled = True
            yield {**shape, "way": name, **kind, **attempt(timed, ours=kind["packed"])}
            release(device)


def _ways(
    point: Point, methods: dict[str, Method], heads: Heads, device: torch.device, libraries: dict[str, peers.Library]
) -> Iterator[tuple[dict[str, bool], str, Callable[[], dict[str, Any]]]]:
    """Yield the kind, name and measurement of each way. Only packed caches have spare capacity."""
    if point.room == 1:
        for name, backend in _backends(point, device).items():
            yield {"packed": False}, f"sdpa {name}", partial(_sdpa, point, backend, heads, device)
        for name, library in libraries.items():
            yield {"packed": False, "peer": True}, name, partial(_peer, point, library, heads, device)
    for name, settings in methods.items():
        yield {"packed": True}, name, partial(_packed, point, settings, heads, device)


def _backends(point: Point, device: torch.device) -> dict[str, sdpa.Backend]:
    """Return the SDPA backends to measure, by name. A CPU has only `flash` and `math`."""
    names = set(sdpa.BACKENDS) if device.type == "cuda" else {"flash", "math"}
    if point.batch * point.context > sdpa.MATH_TOKENS:
        names.discard("math")
    return {name: backend for name, backend in sdpa.BACKENDS.items() if name in names}


def _new_token(point: Point, heads: Heads, device: torch.device) -> list[torch.Tensor]:
    """Make a random query `[B, Hq, 1, D]`, key and value `[B, Hkv, 1, D]`: one new token for each row."""
    return [
        torch.randn(point.batch, h, 1, heads.dim, dtype=heads.dtype, device=device)
        for h in (heads.query, heads.kv, heads.kv)
    ]


@torch.no_grad()
def _sdpa(point: Point, backend: sdpa.Backend, heads: Heads, device: torch.device) -> dict[str, Any]:
    n_bytes = point.batch * point.context * heads.bytes_per_token()
    token = _new_token(point, heads, device)
    sets = range(working_sets(n_bytes, device))
    steps = [sdpa.Cache(heads, point.batch, point.context, device).step(backend, *token) for _ in sets]
    check_finite(steps[0]())
    return _timed(steps, n_bytes, device)


@torch.no_grad()
def _peer(point: Point, library: peers.Library, heads: Heads, device: torch.device) -> dict[str, Any]:
    """Measure each choice of a peer, and return the fastest."""
    token = peers.telling_token(heads, point.batch, point.context, device)
    first = library.make(heads, point.batch, point.context, device)
    n_bytes = sum(x.nbytes for x in first.contents())
    others = range(1, working_sets(n_bytes, device))
    caches = [first, *(library.make(heads, point.batch, point.context, device) for _ in others)]
    found = []
    for choice in first.choices:
        steps = [cache.step(choice, token) for cache in caches]
        difference = round(peers.check(steps[0](), token, first), 5)
        row = {"difference": difference, "choice": choice, "writer": first.writer}
        found.append(_timed(steps, n_bytes, device) | row)
    return min(found, key=lambda row: row["ms"])


def _timed(steps: list[Work], n_bytes: int, device: torch.device) -> dict[str, Any]:
    """Return the figures of `steps`, which read `n_bytes` from different buffers."""
    buffers = len(steps)
    steps = steps * (-(-SDPA_STEPS // buffers) if device.type == "cuda" else 1)
    times = measure(capture(steps, device), device)
    return _result(times, len(steps), n_bytes) | {"buffers": buffers}


class PackedSteps(NamedTuple):
    """Decode steps of packed layers, ready to be timed.

    Attributes:
        replay: runs the steps.
        restore: resets the layers. Call it before each run.
        number: number of steps.
        layers: layers that take the steps in turn.
    """

    replay: Work
    restore: Work
    number: int
    layers: list[QAttnLayer]


@torch.no_grad()
def packed_steps(point: Point, settings: Method, heads: Heads, device: torch.device) -> PackedSteps:
    """Make steps of packed layers whose lengths are spread over a span. Each layer takes several tokens in a replay.

    A replay thus closes as many blocks as decoding does on average: one for every `span` tokens of a row. The mean
    length over its steps is `context`.
    """
    probe = make_layer(settings, heads, point.batch, 1, device)
    span = probe.spec.window.span
    tokens_bytes = bytes_read(probe, probe.capacity) // probe.capacity * point.context
    sets = working_sets(tokens_bytes, device)
    sets = _divisor_from(span, sets) if sets <= span else -(-sets // span) * span
    each = max(1, span // sets)  # tokens that a layer takes in one replay
    first = max(0, point.context - span // 2)
    capacity = max(point.context * point.room, first + 3 * span)
    layers = [make_layer(settings, heads, point.batch, capacity, device) for _ in range(sets)]
    for i, layer in enumerate(layers):
        fill(layer, first + i * each % span)

    q, k, v = _new_token(point, heads, device)
    columns = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    scores = Scores(heads.dim**-0.5)

    def step(layer: Any) -> torch.Tensor:
        return layer.attend(q, layer.update(k, v)[0], columns, scores)[0]

    restore = bookkeeping(layers)
    for layer in layers:
        check_finite(step(layer))
    restore()
    steps = [lambda layer=layer: step(layer) for _ in range(each) for layer in layers]
    return PackedSteps(capture(steps, device), restore, len(steps), layers)


@torch.no_grad()
def _packed(point: Point, settings: Method, heads: Heads, device: torch.device) -> dict[str, Any]:
    steps = packed_steps(point, settings, heads, device)
    layer, times = steps.layers[0], measure(steps.replay, device, prepare=steps.restore)
    return _result(times, steps.number, bytes_read(layer, point.context)) | {
        "buffers": len(steps.layers),
        "capacity": layer.capacity,
        "impl": layer.spec.impl,
    }


def _divisor_from(span: int, least: int) -> int:
    """Return the smallest divisor of `span` that is not below `least`."""
    return next(n for n in range(least, span + 1) if span % n == 0)


def _result(times: Times, steps: int, n_bytes: int) -> dict[str, Any]:
    ms, low, high = (round(value / steps, 6) for value in times[:3])
    return {
        "ms": ms,
        "ms_low": low,
        "ms_high": high,
        "kv_bytes": n_bytes,
        "gb_per_s": n_bytes / ms / 1e6,
        "steps": steps,
        "replays": times.runs,
    }
