"""Properties of a GPU that decide which kernels it can run and how they are launched."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple

import torch

DEFAULT = "NVIDIA H200"  # its tuned configurations serve GPUs without measurements
KIB = 1024
RESERVED = KIB  # bytes of a multiprocessor's shared memory that CUDA keeps for each block
# Environment variable that limits a block's shared memory, in KiB, so that a large GPU uses a small GPU's tiles. Set it
# before the process starts: calls with a launch plan keep their tiles.
LIMIT = "QATTN_SHARED_KIB"


class Chip(NamedTuple):
    """Properties that differ between GPUs.

    Attributes:
        multiprocessors: their number.
        shared: bytes of shared memory of a multiprocessor.
        name: key of the tuned configurations.
        block: bytes of shared memory that a program can have.
        capability: compute capability.
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
    def dependent(self) -> bool:
        """Whether a kernel can be launched before the previous one has ended (`jit/dependent.py`)."""
        return self.capability >= (9, 0)

    @property
    def wgmma(self) -> bool:
        """Whether tensor cores read both operands from shared memory, as on Hopper and data-centre Blackwell."""
        return self.capability[0] in (9, 10)


H200 = Chip(132, 233472)  # the interpreter uses it as well

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
    """Return the properties of `device`, without the limit of the environment."""
    if (chip := _pretended.get()) is not None:
        return chip
    if device.type != "cuda":
        return H200
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _gpu(index: int) -> Chip:
    found: Any = torch.cuda.get_device_properties(index)  # its type stubs are incomplete
    return Chip(
        found.multi_processor_count,
        found.shared_memory_per_multiprocessor,
        found.name,
        found.shared_memory_per_block_optin,
        (found.major, found.minor),
    )


def chip_here() -> Chip:
    """Return the properties of the GPU in use. On a CPU the interpreter counts as a Hopper GPU.

    Raises:
        ValueError: as `chip_of`.
    """
    return chip_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def chip_of(device: torch.device) -> Chip:
    """Return the properties of `device`, with the environment's limit on shared memory.

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
