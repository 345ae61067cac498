"""Tiles: which launch configurations of a prompt's attention are fastest on this GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from qattn_hf.bench import prefill
from qattn_hf.bench.layers import Heads
from qattn_hf.bench.prefill import Point
from qattn_hf.bench.timing import attempt, release
from qattn_hf.messages.origin import versions
from qattn_hf.methods import Method
from qattn_kernels.layer.support import no_triton, unsupported
from qattn_kernels.step import tiles
from qattn_kernels.step.warm import LayerShape

FULL = [Point(4, 4096), Point(1, 16384)]
QUICK = [Point(2, 2048)]
TINY = [Point(1, 96)]
WORTH = 0.98  # of the time in use: tiles that save less stay as they are, since timings differ by about that much
FIELDS = ("bn", "tail", "warps", "stages", "queries")

Row = dict[str, Any]
Timer = Callable[[Point, Method, Heads, torch.device], dict[str, Any]]


def by_kernels(point: Point, method: Method, heads: Heads, device: torch.device) -> dict[str, Any]:
    """Measure a prompt whose attention runs in kernels, as for padded prompts."""
    return prefill.packed(point, method, heads, device, unpadded=False)


def rows(
    points: Iterable[Point],
    methods: dict[str, Method],
    heads: Heads,
    device: torch.device,
    timer: Timer = by_kernels,
) -> Iterator[Row]:
    """Measure prompts with each configuration that fits the GPU, and yield one row for each, the one in use first.

    Args:
        points: batch and prompt lengths.
        methods: settings of packed caches, by name. One for each kind of products is enough.
        heads: shape of the layer.
        device: a GPU.
        timer: measures a prompt, and returns `ms`.

    Yields:
        `way`, the shapes, `kind` and `dim` of the configuration, its fields, and `ms`, or an `error`.

    Raises:
        ValueError: no kernels compute a method on this device.
    """
    for point in points:
        for name, method in methods.items():
            spec = replace(method.last_layer_spec(heads.kv), impl="triton")
            if reason := no_triton(device.type) or unsupported(spec, heads.kv, heads.dim, heads.dim):
                raise ValueError(f"--method {name} has no tiles here: {reason}")
            shape = LayerShape(spec, heads.query, heads.kv, heads.dim, heads.dtype, device)
            chip, (kind, dim) = tiles.chip_of(device), tiles.kind_of(shape)
            for config in tiles.candidates(shape):
                row = {"bench": "tiles", **point._asdict(), **heads.row(), "way": name, "kind": kind, "dim": dim}
                with tiles.trying(chip, (kind, dim), config):
                    figures = attempt(partial(timer, point, method, heads, device), ours=False)
                yield {**row, **{key: getattr(config, key) for key in FIELDS}, "packed": False, **figures}
                release(device)


def config_of(row: Row) -> tiles.Prefill:
    return tiles.Prefill(*(row[key] for key in FIELDS))


def best(rows: Iterable[Row]) -> dict[tuple[str, int], tiles.Prefill]:
    """Return the fastest configuration of each kind and dimension, if it is faster than the one in use.

    Times count in relation to the configuration in use, at each point and method. One that failed at a point is out."""
    first: dict[tuple, float] = {}
    ratios: dict[tuple[str, int], dict[tiles.Prefill, list[float]]] = {}
    for row in rows:
        place = row["batch"], row["tokens"], row["way"], row["kind"], row["dim"]
        in_use = first.setdefault(place, row.get("ms", math.nan))
        ratios.setdefault(place[3:], {}).setdefault(config_of(row), []).append(row.get("ms", math.inf) / in_use)
    found = {}
    for key, times in ratios.items():
        most = max(map(len, times.values()))
        whole = {config: math.prod(x) ** (1 / most) for config, x in times.items() if len(x) == most}
        config = min(whole, key=lambda one: whole[one])
        if whole[config] < WORTH:
            found[key] = config
    return found


def keep(rows: list[Row], device: torch.device) -> Path:
    """Write the `best` configurations and the rows to the user's file for this GPU, and return the file."""
    return tiles.keep(tiles.chip_of(device), best(rows), {"versions": versions(), "rows": rows})
