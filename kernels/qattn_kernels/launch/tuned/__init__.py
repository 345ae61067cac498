"""Measured launch configurations, one JSON file per GPU.

A file has the GPU's name in lower case with hyphens: `nvidia-h200.json` for "NVIDIA H200". Some come with this package.
`qattn bench tiles` writes the file of a user's GPU to `folder()`, where it precedes those of the package. A GPU without
a file uses the file of a GPU with its compute capability, or else that of `DEFAULT`, and a line is logged.
Configurations change results only in the last digits, through the order of sums. INT8 weights also depend on the tile
whose largest weight they are rounded against."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from qattn_kernels.chip import DEFAULT, Chip

log = logging.getLogger(__name__)

FOLDER = "QATTN_TUNED"  # environment variable: the folder of a user's own files
# What kernels take, by field of `Prefill`
ALLOWED = {
    "bn": (16, 32, 64, 128),
    "tail": (16, 32, 64, 128),
    "warps": (1, 2, 4, 8),
    "stages": (1, 2, 3, 4, 5),
    "queries": (32, 64, 128),
}


class Prefill(NamedTuple):
    """Launch configuration of a prefill.

    Attributes:
        bn: slots per tile without position checks.
        tail: slots per tile with position checks.
        warps: warps per 64 queries of a program.
        stages: tiles in flight.
        queries: queries per program, unless their shared scale decides.
        kib: minimum KiB of shared memory per program for which the configuration pays, 0 for any.
    """

    bn: int
    tail: int
    warps: int
    stages: int
    queries: int = 64
    kib: int = 0


class Decode(NamedTuple):
    """How many programs share a row's context in a decode (split-KV).

    Attributes:
        least: minimum blocks per program with many rows: with fewer, its startup and its part of the merge cost more
            than it saves.
        long: tokens per program from which a context is long; half that number if all programs have room, a quarter if
            few have.
        most: maximum programs per row and head that are worth their merge, if each has fewer tokens than `long`.
        most_long: the same if each has more.
        whole: fraction of a wave's places that programs should fill.
    """

    least: int
    long: int
    most: int
    most_long: int
    whole: float


class Tuned(NamedTuple):
    """Measurements on one GPU.

    Attributes:
        gpu: name from `torch.cuda.get_device_name`.
        capability: its compute capability.
        decode: configuration of all decode calls.
        prefill: configurations by kind and head dimension. The kind is the dtype of the product with values ("int8",
            "fp8", "half", "float"). The dimension is the larger one of K and V, rounded up to a power of two from 64
            on. The best configuration comes first, then smaller ones (`launch.tiles`).
    """

    gpu: str
    capability: tuple[int, int]
    decode: Decode
    prefill: dict[tuple[str, int], tuple[Prefill, ...]]


_trial: ContextVar[Tuned | None] = ContextVar("_trial", default=None)


def folder() -> Path:
    """Return the folder of a user's own files: `QATTN_TUNED`, or `qattn/tuned` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(FOLDER) or Path(cache) / "qattn" / "tuned")


def file_name(gpu: str) -> str:
    return f"{gpu.lower().replace(' ', '-').replace('/', '-')}.json"


def _checked(config: Prefill) -> Prefill:
    for key, allowed in ALLOWED.items():
        if getattr(config, key) not in allowed:
            raise ValueError(f"{key} is {getattr(config, key)!r}, which is not among {allowed}")
    return config


def parse(text: str, where: str) -> Tuned:
    """Return the table in the text of a file.

    Raises:
        ValueError: the text is no such table, or names a tile that kernels do not take.
    """
    try:
        table = json.loads(text)
        prefill = {
            (kind, int(dim)): tuple(_checked(Prefill(**config)) for config in configs)
            for kind, dims in table["prefill"].items()
            for dim, configs in dims.items()
        }
        major, minor = map(int, table["capability"])
        found = Tuned(table["gpu"], (major, minor), Decode(**table["decode"]), prefill)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where} has no launch configurations: {error!r}. Fix: remove it, or make it anew with `qattn bench tiles`"
        ) from None
    return found


def as_text(tuned: Tuned, measured: Any = None) -> str:
    """Return a table as the text of a file, with the figures that it was chosen by."""
    prefill: dict[str, dict[str, list[dict[str, int]]]] = {}
    for (kind, dim), configs in tuned.prefill.items():
        prefill.setdefault(kind, {})[str(dim)] = [config._asdict() for config in configs]
    table = {**tuned._asdict(), "decode": tuned.decode._asdict(), "prefill": prefill, "measured": measured}
    return json.dumps(table, indent=1) + "\n"


def files() -> Iterator[Any]:
    """Yield the user's own files, then those of this package."""
    for place in (folder(), resources.files(__name__)):
        if place.is_dir():
            yield from sorted((file for file in place.iterdir() if file.name.endswith(".json")), key=lambda x: x.name)


@lru_cache
def read(gpu: str) -> Tuned | None:
    """Return the table of a GPU by its name, or None.

    Raises:
        ValueError: as `parse`.
    """
    file = next((file for file in files() if file.name == file_name(gpu)), None)
    return None if file is None else parse(file.read_text(encoding="utf-8"), str(file))


def tuned_for(chip: Chip) -> Tuned:
    """Return the table of a GPU, of one with its compute capability, or of `DEFAULT`. A fallback is logged once."""
    return _trial.get() or _tuned_for(chip.name, chip.capability)


@lru_cache
def _tuned_for(gpu: str, capability: tuple[int, int]) -> Tuned:
    found = read(gpu)
    if found is None:
        others = (parse(file.read_text(encoding="utf-8"), str(file)) for file in files())
        found = next((one for one in others if one.capability == capability), read(DEFAULT))
        assert found is not None
        log.warning(
            "no launch configurations were measured on %s: the file of %s is used. `qattn bench tiles` measures them",
            gpu, found.gpu,
        )  # fmt: skip
    return found


def forget() -> None:
    """Read files anew at the next launch of a new shape."""
    read.cache_clear()
    _tuned_for.cache_clear()


@contextmanager
def trying(tuned: Tuned) -> Iterator[None]:
    """Context in which every GPU has the table `tuned`."""
    token = _trial.set(tuned)
    try:
        yield
    finally:
        _trial.reset(token)
