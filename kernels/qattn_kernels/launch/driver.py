"""Launches by CUDA's driver API, whose arguments lie ready in memory.

Triton's own launcher reads every argument anew, numbers and nested tuples too: of the host's time for a launch that is
more than the driver's own. What a kernel takes is asked of the driver before the first launch; if that is not what its
signature says, there is no `Direct`, and Triton launches.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

SLOT = 8  # bytes of room for an argument, which begins there
NUMBERS = {"i1": "?", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "fp32": "f", "fp64": "d"}
NUMBERS |= {"u1": "?", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
SCRATCH = 2  # pointers behind a kernel's own arguments, of which these kernels use none
THREADS = 32  # of a warp
ABSENT = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")  # of these launches


class Config(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = [
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("count", c_uint),
    ]


@cache
def driver() -> Any:
    """CUDA's driver, with what a `Direct` calls; None where it cannot say what a kernel takes (before 12.4)."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuFuncGetParamInfo.argtypes = [c_void_p, c_size_t, c_void_p, c_void_p]
        library.cuLaunchKernelEx.argtypes = [c_void_p] * 4
    except (OSError, AttributeError):
        return None
    return library


def flat(kinds: Any, values: Any) -> Iterator[tuple[str, Any]]:
    """Type and value of each argument that a kernel takes, of nested tuples and without constants.

    Args:
        kinds: types by Triton's names (`*fp32`, `i32`), or tuples of them, as in a kernel's signature.
        values: likewise.
    """
    for kind, value in zip(kinds, values, strict=True):
        if isinstance(kind, tuple):
            yield from flat(kind, value)
        elif kind != "constexpr":
            yield kind, value


def n_bytes(kind: str) -> int:
    """Bytes of an argument; 0 if that is not known here."""
    if kind.startswith("*"):
        return SLOT
    return struct.calcsize(NUMBERS[kind]) if kind in NUMBERS else 0


class Direct:
    """A launch of a compiled kernel with arguments that stay, but for some addresses.

    Args:
        library: of `driver`. function: the kernel's handle. grid, warps, shared: of the launch.
        arguments: as of `flat`; pointers that are no numbers yet are to be put into `slots`.

    Attributes:
        slots: the arguments, by number.
    """

    def __init__(
        self,
        library: Any,
        function: int,
        arguments: Sequence[tuple[str, Any]],
        grid: tuple[int, ...],
        warps: int,
        shared: int,
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
        self.config = Config(*grid, THREADS * warps, 1, 1, shared, None, None, 0)
        self._config = byref(self.config)

    def __call__(self, stream: int) -> int:
        """Launch; returns the driver's error code, 0 for none. Another thread may not launch the same one meanwhile."""
        self.config.stream = stream
        code: int = self._call(self._config, self._function, self._places, None)
        return code


def direct(kernel: Any, grid: tuple[int, ...], arguments: Sequence[tuple[str, Any]]) -> Direct | None:
    """A `Direct` of a compiled kernel of Triton, or None where Triton has to launch it. Arguments as there."""
    library, metadata = driver(), kernel.metadata
    if library is None or metadata.num_ctas != 1 or 0 in grid or any(getattr(metadata, name, 1) for name in ABSENT):
        return None
    sizes = [*(n_bytes(kind) for kind, _ in arguments), *[SLOT] * SCRATCH]
    if _parameters(library, kernel.function, len(sizes) + 1) != sizes:
        return None
    return Direct(library, kernel.function, arguments, grid, metadata.num_warps, metadata.shared)


def _parameters(library: Any, function: int, most: int) -> list[int]:
    """Bytes of each of the first `most` parameters of a kernel, as the driver has it."""
    found, offset, size = [], c_size_t(), c_size_t()
    for i in range(most):
        if library.cuFuncGetParamInfo(function, i, byref(offset), byref(size)):
            break
        found.append(size.value)
    return found
