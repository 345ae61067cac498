"""Launch kernels through CUDA's driver API, with prepared arguments in memory.

Triton's launcher parses every argument again, including numbers and nested tuples. That takes more host time than the
driver's launch itself. Before the first launch, the driver reports the kernel's parameters. If they do not match the
kernel's signature, `direct` returns None, and Triton launches."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p, pointer
from functools import cache
from typing import Any

SLOT = 8  # bytes per argument slot
NUMBERS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "fp32": "f", "fp64": "d"}
NUMBERS |= {"u1": "?", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
SCRATCH = 2  # extra pointers after a kernel's arguments, unused by these kernels
THREADS = 32  # threads per warp
ABSENT = ("launch_cooperative_grid", "global_scratch_size", "profile_scratch_size")  # must be off


class Attribute(ctypes.Structure):
    """`CUlaunchAttribute` of the driver API, with a number as its value."""

    _fields_ = (("id", c_uint), ("padding", c_uint), ("value", c_int), ("rest", c_uint * 15))


DEPENDENT = Attribute(id=6, value=1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Config(ctypes.Structure):
    """`CUlaunchConfig` of the driver API."""

    _fields_ = [
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", c_void_p),
        ("attributes", POINTER(Attribute)),
        ("count", c_uint),
    ]


@cache
def driver() -> Any:
    """Return CUDA's driver library with typed functions, or None if it cannot report kernel parameters (before
    12.4)."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuFuncGetParamInfo.argtypes = [c_void_p, c_size_t, c_void_p, c_void_p]
        library.cuLaunchKernelEx.argtypes = [c_void_p] * 4
    except (OSError, AttributeError):
        return None
    return library


def flat(kinds: Any, values: Any) -> Iterator[tuple[str, Any]]:
    """Yield type and value of each kernel argument, flattened from nested tuples, without constants.

    Args:
        kinds: Triton's type names (`*fp32`, `i32`) or tuples of them, as in a kernel's signature.
        values: values of the same structure.
    """
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from flat(kind, value)
        elif kind != "constexpr":
            yield kind, value


def n_bytes(kind: str) -> int:
    """Return the bytes of an argument, or 0 for an unknown type."""
    if kind.startswith("*"):
        return SLOT
    return struct.calcsize(NUMBERS[kind]) if kind in NUMBERS else 0


class Direct:
    """A launch of a compiled kernel with fixed arguments, apart from some addresses.

    Args:
        library: result of `driver`.
        function: handle of the kernel.
        arguments: items of `flat`. Pointers that are not numbers yet must be written to `slots` before a launch.
        grid, warps, shared: launch configuration.
        dependent: the kernel may be launched before the previous one has ended (`jit/dependent.py`).

    Attributes:
        slots: argument values, by index.
    """

    def __init__(
        self,
        library: Any,
        function: int,
        arguments: Sequence[tuple[str, Any]],
        grid: tuple[int, ...],
        warps: int,
        shared: int,
        dependent: bool,
    ):
        self._call, self._function = library.cuLaunchKernelEx, c_void_p(function)
        self.slots = (c_uint64 * (len(arguments) + SCRATCH))()
        for i, (kind, value) in enumerate(arguments):
            if not kind.startswith("*"):
                struct.pack_into(NUMBERS[kind], self.slots, i * SLOT, value)
            elif isinstance(value, int):
                self.slots[i] = value
        first = ctypes.addressof(self.slots)
        self._places = (c_void_p * len(self.slots))(*[first + i * SLOT for i in range(len(self.slots))])
        attributes = pointer(DEPENDENT) if dependent else None
        self.config = Config(*grid, THREADS * warps, 1, 1, shared, None, attributes, dependent)
        self._config = byref(self.config)

    def __call__(self, stream: int) -> int:
        """Launch and return the driver's error code, 0 for none. Not thread-safe for one instance."""
        self.config.stream = stream
        code: int = self._call(self._config, self._function, self._places, None)
        return code


def direct(kernel: Any, grid: tuple[int, ...], arguments: Sequence[tuple[str, Any]]) -> Direct | None:
    """Return a `Direct` for a compiled Triton kernel, or None if Triton must launch it.

    Args:
        kernel: the compiled kernel.
        grid: blocks in each dimension.
        arguments: items of `flat`.
    """
    library, metadata = driver(), kernel.metadata
    if library is None or metadata.num_ctas != 1 or 0 in grid or any(getattr(metadata, name, 1) for name in ABSENT):
        return None
    sizes = [*(n_bytes(kind) for kind, _ in arguments), *[SLOT] * SCRATCH]
    if _parameters(library, kernel.function, len(sizes) + 1) != sizes:
        return None
    return Direct(library, kernel.function, arguments, grid, metadata.num_warps, metadata.shared, metadata.launch_pdl)


def _parameters(library: Any, function: int, most: int) -> list[int]:
    """Return the bytes of each of a kernel's first `most` parameters, as reported by the driver."""
    found, offset, size = [], c_size_t(), c_size_t()
    for i in range(most):
        if library.cuFuncGetParamInfo(function, i, byref(offset), byref(size)):
            break
        found.append(size.value)
    return found
