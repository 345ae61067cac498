"""What a GPU has that decides how kernels are launched on it, and which of them it can run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch

DEFAULT = "NVIDIA H200"  # whose configurations serve a GPU without its own
KIB = 1024
RESERVED = KIB  # bytes of a multiprocessor's shared memory that CUDA keeps for each block
# The environment variable that limits the shared memory of a block, in KiB: a large GPU then gets the tiles of a small
# one. It is read at every choice, but a call that has a plan keeps its tiles: set it before the process starts.
LIMIT = "QATTN_SHARED_KIB"


class Chip(NamedTuple):
    """What differs between GPUs.

    Attributes:
        multiprocessors: how many.
        shared: bytes of shared memory that each of them has.
        name: under which is kept what was measured on them.
        block: bytes of shared memory that a program can have.
        capability: its compute capability.
    """

    multiprocessors: int
    shared: int
    name: str = DEFAULT
    block: int = 227 * KIB
    capability: tuple[int, int] = (9, 0)

    @property
    def fp8(self) -> bool:
        """Whether tensor cores multiply FP8, and instructions convert it."""
        return self.capability >= (8, 9)

    @property
    def wgmma(self) -> bool:
        """Whether tensor cores read both operands in shared memory: those of Hopper and of data-centre Blackwell."""
        return self.capability[0] in (9, 10)


H200 = Chip(132, 233472)  # stands for the interpreter, too

# KiB of shared memory that a program can have, by compute capability (CUDA C++ Programming Guide, technical
# specifications)
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}

_pretended: ContextVar[Chip | None] = ContextVar("_pretended", default=None)


def chip_with(capability: int, multiprocessors: int = 60) -> Chip:
    """Return a GPU of a compute capability in `SHARED`, as 10 * major + minor. It has the name of `DEFAULT`."""
    block = SHARED[capability] * KIB
    return Chip(multiprocessors, block + RESERVED, DEFAULT, block, divmod(capability, 10))


@contextmanager
def as_chip(chip: Chip) -> Iterator[None]:
    """Context in which every device is `chip`: to choose launches, or to ask what has kernels, for another GPU."""
    token = _pretended.set(chip)
    try:
        yield
    finally:
        _pretended.reset(token)


def properties(device: torch.device) -> Chip:
    """The GPU that `device` is, whatever the environment says."""
    if (chip := _pretended.get()) is not None:
        return chip
    if device.type != "cuda":
        return H200
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _gpu(index: int) -> Chip:
    found: Any = torch.cuda.get_device_properties(index)  # of which its type stubs list less
    return Chip(
        found.multi_processor_count,
        found.shared_memory_per_multiprocessor,
        found.name,
        found.shared_memory_per_block_optin,
        (found.major, found.minor),
    )


def chip_of(device: torch.device) -> Chip:
    """The GPU that `device` is, with the shared memory that the environment leaves it.

    Raises:
        ValueError: the environment variable holds no positive integer.
    """
    chip, text = properties(device), os.environ.get(LIMIT)
    if not text:
        return chip
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ValueError(f"{LIMIT} is {text!r}, which is no number of KiB: set a positive integer such as 99, or none")
    block = min(chip.block, int(text) * KIB)
    return chip._replace(block=block, shared=min(chip.shared, block + RESERVED))
