"""Launch plans: the kernel launches of one call shape, recorded once and repeated.

Computing the arguments of a call's kernels, and Triton's processing of them, costs the host more than all else in a
decode step. The first call of a shape is therefore recorded: its kernels, and for each pointer argument the tensor of
the call and the offset into it. Later calls fill in addresses and launch the compiled kernels. A plan contains no
address, so all layers of a model share it.

    planned(key, inputs, compute, *arguments)        # results of compute(*arguments), recorded or launched from a plan
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from qattn_kernels.launch.driver import Direct, direct, flat
from qattn_kernels.launch.launches import CONSTANTS, Launch, Recorder, recorded

log = logging.getLogger(__name__)

ALIGNMENT = 512  # alignment of temporary tensors in bytes, as in PyTorch, so that kernels compiled for one fit both
PLANS = 1024  # maximum plans, then all are dropped; each new prompt length adds one
ARENAS = 4096  # arena addresses for which a plan keeps arguments
# Arguments of Triton's launcher in front of the kernel's own: grid (3), stream, function, packed metadata, hook
# metadata, enter and exit hooks.
LEAD, STREAM = 9, 3


@dataclass(frozen=True)
class Pointer:
    """An address relative to a tensor of the call.

    Attributes:
        base: index of the tensor: the call's inputs, then its results, then the buffer for temporary tensors.
        offset: bytes after the tensor's start.
        dtype: dtype of the data.
    """

    base: int
    offset: int
    dtype: torch.dtype


class Bound(NamedTuple):
    """A launch bound to one arena.

    Attributes:
        direct: launch through the driver, or None.
        places: addresses to fill in per call: `(argument index, tensor index, bytes after its start)`.
        run: Triton's launcher of the kernel, called with `arguments`.
        watched: the kernel's call, which notifies profilers, called with the kernel's own arguments.
        arguments: `LEAD` launcher arguments, then the kernel's own, with addresses in the arena filled in. The stream
            is a placeholder; other tensors' addresses are `Pointer`s.
    """

    direct: Direct | None
    places: list[tuple[int, int, int]]
    run: Callable[..., Any]
    watched: Callable[..., Any]
    arguments: tuple[Any, ...]


class OverArena(NamedTuple):
    """Launches of a plan over one arena, and the addresses that all of them currently hold, or an empty list."""

    launches: list[Bound]
    filled: list[int]


class Result(NamedTuple):
    """Size, stride and dtype of a tensor that a call returns."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Unplannable(Exception):
    """A call that no plan can repeat; the message has the reason."""


class Plan:
    """The launches of calls of one shape.

    Args:
        launches: launches in order.
        results: tensors that the call returns.
        temporary: bytes of its temporary tensors.
    """

    def __init__(self, launches: list[Launch], results: list[Result], temporary: int):
        self.launches, self.results, self.temporary = launches, results, temporary
        self._bound: dict[int, OverArena] = {}  # by arena address

    def run(self, inputs: Sequence[torch.Tensor | None], addresses: list[int]) -> list[torch.Tensor]:
        """Launch everything for these inputs at these addresses. The first input, the arena, keeps its address between
        calls."""
        assert inputs[0] is not None
        device = inputs[0].device
        results = [torch.empty_strided(x.size, x.stride, dtype=x.dtype, device=device) for x in self.results]
        room = torch.empty(self.temporary, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            self._interpret([*inputs, *results, room])
            return results
        addresses = [*addresses, *[x.data_ptr() for x in (*results, room)]]
        if torch.cuda.current_device() == device.index:
            self._launch(addresses, _current_stream()(device.index))
        else:  # Triton launches on the current device, not on the tensors' device
            with torch.cuda.device(device):
                self._launch(addresses, _current_stream()(device.index))
        return results

    def _launch(self, addresses: list[int], stream: int) -> None:
        bound = self._bound.get(addresses[0])
        if bound is None:
            if len(self._bound) >= ARENAS:
                self._bound.clear()
            bound = self._bound[addresses[0]] = OverArena([_bind(x, addresses[0]) for x in self.launches], [])
        watched, filled = _watched(), bound.filled
        again = filled == addresses  # PyTorch's allocator usually reuses the same memory
        if not again:
            filled.clear()
        for one in bound.launches:
            if watched or one.direct is None:
                _by_triton(one, addresses, stream, watched)
                continue
            if not again:
                slots = one.direct.slots
                for slot, base, offset in one.places:
                    slots[slot] = addresses[base] + offset
            if one.direct(stream):  # on an error, Triton's launcher creates a missing context or names the error
                _by_triton(one, addresses, stream)
        if not (again or watched):
            filled.extend(addresses)

    def _interpret(self, tensors: list[torch.Tensor | None]) -> None:
        """Launch in Triton's interpreter, whose pointers are tensors."""

        def tensor(pointer: Pointer) -> torch.Tensor:
            return _at(tensors[pointer.base], pointer)

        for kernel, grid, arguments, options in self.launches:
            kernel[grid](*_mapped(tensor, arguments), **{name: _mapped(tensor, x) for name, x in options.items()})


@cache
def _current_stream() -> Callable[[int], int]:
    """Return Triton's function for the current stream of a GPU."""
    from triton.runtime import driver

    return driver.active.get_current_stream


@cache
def _triton() -> Any:
    """Return Triton's launch settings, including profiler hooks."""
    from triton import knobs

    return knobs.runtime


def _watched() -> bool:
    """Return whether a profiler listens to launches. Without one, launches skip the work for its hooks."""
    before, behind = _triton().launch_enter_hook, _triton().launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(behind, "calls", behind))


def _bind(one: Launch, arena: int) -> Bound:
    """Return a launch with all addresses in the arena at `arena` filled in."""

    def fixed(pointer: Pointer) -> Any:
        return pointer if pointer.base else arena + pointer.offset

    kernel, run = one.kernel, one.kernel.run  # `kernel.run` loads the kernel if needed
    own = _mapped(torch.Tensor.data_ptr, _mapped(fixed, one.arguments), torch.Tensor)
    taken = list(flat(kernel.src.signature.values(), own))
    places = [(i, x.base, x.offset) for i, (_, x) in enumerate(taken) if isinstance(x, Pointer)]
    lead = *one.grid, None, kernel.function, kernel.packed_metadata, None, None, None
    return Bound(direct(kernel, one.grid, taken), places, run, kernel[one.grid], (*lead, *own))


def _by_triton(one: Bound, addresses: list[int], stream: int, watched: bool = False) -> None:
    """Launch with Triton's launcher, which profilers can watch."""
    filled = list(_mapped(lambda x: addresses[x.base] + x.offset, one.arguments))
    filled[STREAM] = stream
    if watched:
        one.watched(*filled[LEAD:], stream=stream)
    else:
        one.run(*filled)


def _at(base: torch.Tensor | None, pointer: Pointer) -> torch.Tensor:
    """Return a one-element tensor at the address of `pointer`."""
    assert base is not None
    start = base.storage_offset() * base.itemsize + pointer.offset
    found = torch.empty(0, dtype=pointer.dtype, device=base.device)
    return found.set_(base.untyped_storage(), start // pointer.dtype.itemsize, (1,), (1,))


def _mapped(change: Callable[[Any], Any], value: Any, kind: type = Pointer) -> Any:
    """Apply `change` to each `kind` inside `value`, through nested plain and named tuples."""
    if isinstance(value, kind):
        return change(value)
    if not isinstance(value, tuple):
        return value
    made = [_mapped(change, x, kind) for x in value]
    return type(value)(*made) if hasattr(value, "_fields") else tuple(made)


class Region(NamedTuple):
    """Addresses of a tensor of the call, `size` bytes from `start` on; they begin `offset` bytes into its base."""

    start: int
    size: int
    base: int
    offset: int


def _plan(
    recorder: Recorder, inputs: Sequence[torch.Tensor | None], results: Sequence[torch.Tensor], arenas: int = 1
) -> Plan:
    """Return the plan of a recorded call, whose first `arenas` inputs are arenas.

    Raises:
        Unplannable: if the call did more than allocate and launch, or an argument belongs to none of its tensors.
    """
    if recorder.foreign is not None:
        raise Unplannable(f"it calls {recorder.foreign}")
    given = [Region(x.data_ptr(), x.nbytes if i < arenas else 1, i, 0) for i, x in enumerate(inputs) if x is not None]
    if len({region.start for region in given}) < len(given):
        raise Unplannable("inputs share an address")
    allocated, room = _allocated(recorder, results, len(inputs))
    mapped = partial(_mapped, partial(_pointer, [*given, *allocated]), kind=torch.Tensor)
    launches = [
        Launch(x.kernel, x.grid, mapped(x.arguments), {name: mapped(value) for name, value in x.options.items()})
        for x in recorder.launches
    ]
    return Plan(launches, [Result(x.shape, x.stride(), x.dtype) for x in results], room)


def _allocated(recorder: Recorder, results: Sequence[torch.Tensor], inputs: int) -> tuple[list[Region], int]:
    """Return the regions that a call allocated, and the bytes that all of them but its results take together.

    Bases are `inputs` inputs, then the results, then the room.
    """
    returned = {x.data_ptr(): i for i, x in enumerate(results, inputs)}
    if not set(returned) <= {x.data_ptr() for x in recorder.allocated}:
        raise Unplannable("it returns a tensor that it did not allocate")
    regions, end = [], 0
    for x in recorder.allocated:
        if (place := returned.get(x.data_ptr())) is not None:
            regions.append(Region(x.data_ptr(), x.nbytes, place, 0))
        else:
            regions.append(Region(x.data_ptr(), x.nbytes, inputs + len(results), end))
            end += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
    return regions, end


def _pointer(regions: Sequence[Region], value: torch.Tensor) -> Pointer | torch.Tensor:
    """Find the region of a tensor argument. Constants stay tensors."""
    if id(value) in CONSTANTS:
        return value
    if not value.numel():
        return Pointer(0, 0, value.dtype)  # empty, never read
    address = value.data_ptr()
    for start, size, base, offset in regions:
        if start <= address < start + size:
            return Pointer(base, offset + address - start, value.dtype)
    raise Unplannable(f"an argument {tuple(value.shape)} {value.dtype} is no tensor of the call")


_plans: dict[Hashable, Plan | None] = {}


def forget_plans() -> None:
    """Forget all plans: the next call of each shape chooses its launches anew."""
    _plans.clear()


def planned(
    key: Hashable,
    inputs: Sequence[torch.Tensor | None],
    compute: Callable[..., Sequence[torch.Tensor]],
    *arguments: Any,
    arenas: int = 1,
) -> Sequence[torch.Tensor]:
    """Return the results of `compute(*arguments)`, launched from the plan of an earlier call if there is one.

    Args:
        key: everything that the launches depend on, apart from addresses: shapes, strides, dtypes, device, settings.
        inputs: tensors that `compute` reads and writes. The first, the layer's arena, keeps its address.
        compute: must only allocate and `launch` on the device; otherwise every call computes again.
        arguments: arguments of `compute`.
        arenas: number of leading inputs that kernels access through views.
    """
    addresses = [0 if x is None else x.data_ptr() for x in inputs]
    key = key, tuple([x % 16 for x in addresses])  # compiled kernels assume alignment
    plan = _plans.get(key)
    if plan is not None:
        return plan.run(inputs, addresses)
    call = partial(compute, *arguments)
    return call() if key in _plans else _record(key, inputs, call, arenas)


def _record(
    key: Hashable, inputs: Sequence[torch.Tensor | None], compute: Callable[[], Sequence[torch.Tensor]], arenas: int
) -> Sequence[torch.Tensor]:
    results, recorder = recorded(compute)
    if len(_plans) >= PLANS:
        _plans.clear()
    try:
        _plans[key] = _plan(recorder, inputs, results, arenas)
    except Unplannable as reason:
        log.debug("no launch plan for this call: %s", reason)
        _plans[key] = None
    return results
