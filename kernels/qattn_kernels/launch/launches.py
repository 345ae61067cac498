"""Launch Triton kernels, with hooks for plans that repeat launches and for compilers.

launch(kernel, grid, *arguments, **options)      # in place of kernel[grid](*arguments, **options)
recorded(compute)                                # the results of compute(), and a record of its launches
collected(compute)                               # the launches of compute(), without launching
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger(__name__)
Result = TypeVar("Result")

SILENT = 1.0  # seconds to wait for a compiler before logging it
ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_like.default,
}


class Launch(NamedTuple):
    """A launch of a compiled kernel with all its arguments. In the interpreter, of the function, with its options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple
    options: dict[str, Any]

    def variant(self) -> tuple:
        """Return a key of the code that Triton compiles for this launch. Launches of equal keys share it."""
        kinds = map(_kind, self.arguments, self.kernel.params)  # a kernel's last parameters are options
        return (self.kernel, *kinds, *sorted(self.options.items()))


def _kind(value: Any, parameter: Any) -> Any:
    """Return what compiled code depends on in an argument: a constant, or the type and the specialized properties."""
    if parameter.is_constexpr:
        return value
    if isinstance(value, tuple):
        return tuple(_kind(one, parameter) for one in value)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int) and not parameter.do_not_specialize:
        return value == 1, value % 16 == 0
    return type(value)


class Recorder(TorchDispatchMode):
    """Record one call: its launches, the tensors that it allocates, and any other work on the device."""

    def __init__(self, collects: bool = False) -> None:
        super().__init__()
        self.collects = collects  # record launches without launching
        self.launches: list[Launch] = []
        self.allocated: list[torch.Tensor] = []  # kept alive, so that addresses stay distinct
        self.foreign: str | None = None  # first operation that a plan cannot repeat
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.paused:
            return out
        if func in ALLOCATIONS:
            self.allocated.append(out)
        elif not func.is_view:
            self.foreign = self.foreign or str(func)
        return out

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context for device work that is not part of the call."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False


_state = threading.local()


_keyed: set[int] = set()  # ids of functions that went through `settle_key` (hashing a function would compute its key)


def settle_key(function: Any) -> None:
    """Compute the key under which Triton caches a function on disk, after the keys of all functions that it calls.

    Triton 3.6 includes the globals of a called function in the key only if the key of that function is known. Without a
    fixed order, threads and processes would compute different keys and recompile cached kernels."""
    if id(function) in _keyed or not hasattr(type(function), "cache_key"):  # interpreter functions have no key
        return
    _keyed.add(id(function))
    for name in function.fn.__code__.co_names:
        called = function.fn.__globals__.get(name)
        if isinstance(called, type(function)):
            settle_key(called)
    _ = function.cache_key


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel, like `kernel[grid](*arguments, **options)`."""
    kind = type(kernel)
    for x in (kernel, *arguments):
        if isinstance(x, kind):
            settle_key(x)
        elif type(x) is tuple:  # a bundle of functions or kernel arguments
            for function in x:
                if isinstance(function, kind):
                    settle_key(function)
    recorder = getattr(_state, "recorder", None)
    if recorder is not None and recorder.collects:
        recorder.launches.append(Launch(kernel, grid, arguments, options))
        return
    if kernel in _expected:
        _wait_for(kernel)
    if recorder is None:
        kernel[grid](*arguments, **options)
        return
    with recorder.pause():
        compiled = kernel[grid](*arguments, **options)
    if compiled is None:  # the interpreter compiles nothing
        recorder.launches.append(Launch(kernel, grid, arguments, options))
        return
    parameters = kernel.signature.parameters
    bound = kernel.signature.bind(*arguments, **{k: v for k, v in options.items() if k in parameters})
    bound.apply_defaults()
    recorder.launches.append(Launch(compiled, (*grid, 1, 1)[:3], tuple(bound.arguments.values()), {}))


def recorded(compute: Callable[[], Result], collects: bool = False) -> tuple[Result, Recorder]:
    """Return the results of `compute()` and its record. With `collects`, nothing launches and results hold no data."""
    recorder = _state.recorder = Recorder(collects)
    try:
        with recorder:
            return compute(), recorder
    finally:
        _state.recorder = None


def collected(compute: Callable[[], Any]) -> list[Launch]:
    """Return the launches of `compute()` without launching. Allocations stay alive until the call ends, as in
    `recorded`."""
    return recorded(compute, collects=True)[1].launches


def compile_launch(one: Launch) -> None:
    """Compile and load the kernel of a launch from `collected`."""
    compiled = one.kernel.warmup(*one.arguments, grid=one.grid, **one.options)
    compiled[(1, 1, 1)]  # indexing loads the kernel and launches nothing


_expected: dict[Any, list[Future]] = {}  # running compilations by kernel function


def expect(kernel: Any, compilation: Future) -> Future:
    """Make launches of `kernel` wait for a compilation in another thread, to avoid compiling it twice."""
    _expected[kernel] = [*_expected.get(kernel, ()), compilation]
    return compilation


def _wait_for(kernel: Any) -> None:
    compilations = _expected.get(kernel)
    if compilations is None:  # another thread already waited
        return
    _, running = wait(compilations, timeout=SILENT)
    if running:
        left = sum(not x.done() for several in list(_expected.values()) for x in several)
        log.warning("compiling %d kernels for this GPU, once: Triton keeps them for later processes", left)
        wait(running)
    _expected.pop(kernel, None)


CONSTANTS: dict[int, torch.Tensor] = {}


def constant(make: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Return `make(*arguments)` as a tensor that plans may keep. It must always be the same, unchanging tensor."""
    recorder = getattr(_state, "recorder", None)
    with recorder.pause() if recorder is not None else nullcontext():
        found = make(*arguments)
    return CONSTANTS.setdefault(id(found), found)
