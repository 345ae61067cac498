"""Launch plans: what the calls of one shape launch, worked out once.

Working out the arguments of a call's kernels, and Triton's own look at each of them, costs the host more than all else
that a decode step does. So the first call of a shape is recorded: which kernels it launches, and for each pointer among
their arguments which tensor of the call it belongs to, and how far behind its start. Later calls fill in addresses and
launch what was compiled, layer by layer: a plan knows no address, so that all layers of a model share it.

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

ALIGNMENT = 512  # bytes between temporary tensors: PyTorch's own, so that kernels compiled for one fit the other
PLANS = 1024  # then all are forgotten; each new prompt length makes one
ARENAS = 4096  # addresses whose arguments a plan keeps
# Arguments of Triton's launcher before the kernel's own: grid (3), stream, function, packed metadata, what hooks are
# told, hooks before and after
LEAD, STREAM = 9, 3


@dataclass(frozen=True)
class Pointer:
    """An address as a plan knows it.

    Attributes:
        base: number of a tensor: first the call's inputs, then its results, then the room for its temporary tensors.
        offset: bytes behind its start.
        dtype: of what lies there.
    """

    base: int
    offset: int
    dtype: torch.dtype


class Bound(NamedTuple):
    """A launch over one arena.

    Attributes:
        direct: it by the driver, if that can be. places: where each call fills in an address: number of the `direct`'s
            argument, of the tensor, and bytes behind its start.
        run: Triton's launcher of the kernel, which takes `arguments`.
        watched: the same as a call of the kernel, which tells profilers; it takes the kernel's own arguments.
        arguments: `LEAD` of the launcher's, then the kernel's own with the arena's addresses; anything where the stream
            belongs, and a `Pointer` where another tensor's address does.
    """

    direct: Direct | None
    places: list[tuple[int, int, int]]
    run: Callable[..., Any]
    watched: Callable[..., Any]
    arguments: tuple[Any, ...]


class OverArena(NamedTuple):
    """A plan's launches over one arena, and the addresses that all of them have filled in, or none."""

    launches: list[Bound]
    filled: list[int]


class Result(NamedTuple):
    """Shape of a tensor that a call returns."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Unplannable(Exception):
    """A call that no plan can repeat, with the reason."""


class Plan:
    """The launches of calls of one shape.

    Args:
        launches: in order. results: what the call returns. temporary: bytes of the tensors that it needs meanwhile.
    """

    def __init__(self, launches: list[Launch], results: list[Result], temporary: int):
        self.launches, self.results, self.temporary = launches, results, temporary
        self._bound: dict[int, OverArena] = {}  # by the address of an arena

    def run(self, inputs: Sequence[torch.Tensor | None], addresses: list[int]) -> list[torch.Tensor]:
        """Launch everything for these inputs at these addresses; that of the first, the arena, stays from call to
        call."""
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
        else:  # Triton launches on the current device, whatever the tensors' own is
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
        again = filled == addresses  # PyTorch's allocator gives a layer's calls the same memory, as a rule
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
            if one.direct(stream):  # Triton's launcher makes a context in threads without one, and names errors
                _by_triton(one, addresses, stream)
        if not (again or watched):
            filled.extend(addresses)

    def _interpret(self, tensors: list[torch.Tensor | None]) -> None:
        """The same in Triton's interpreter, whose pointers are tensors."""

        def tensor(pointer: Pointer) -> torch.Tensor:
            return _at(tensors[pointer.base], pointer)

        for kernel, grid, arguments, options in self.launches:
            kernel[grid](*_mapped(tensor, arguments), **{name: _mapped(tensor, x) for name, x in options.items()})


@cache
def _current_stream() -> Callable[[int], int]:
    """Triton's function that gives the current stream of a GPU."""
    from triton.runtime import driver

    return driver.active.get_current_stream


@cache
def _triton() -> Any:
    """Triton's settings of launches, the hooks of profilers among them."""
    from triton import knobs

    return knobs.runtime


def _watched() -> bool:
    """Whether a profiler listens to launches. If none does, what Triton would prepare for it is left out."""
    before, behind = _triton().launch_enter_hook, _triton().launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(behind, "calls", behind))


def _bind(one: Launch, arena: int) -> Bound:
    """A launch with the addresses in the arena that begins at `arena` filled in."""

    def fixed(pointer: Pointer) -> Any:
        return pointer if pointer.base else arena + pointer.offset

    kernel, run = one.kernel, one.kernel.run  # which loads it, where nothing has yet
    own = _mapped(torch.Tensor.data_ptr, _mapped(fixed, one.arguments), torch.Tensor)
    taken = list(flat(kernel.src.signature.values(), own))
    places = [(i, x.base, x.offset) for i, (_, x) in enumerate(taken) if isinstance(x, Pointer)]
    lead = *one.grid, None, kernel.function, kernel.packed_metadata, None, None, None
    return Bound(direct(kernel, one.grid, taken), places, run, kernel[one.grid], (*lead, *own))


def _by_triton(one: Bound, addresses: list[int], stream: int, watched: bool = False) -> None:
    """A launch by Triton's launcher, whom profilers watch."""
    filled = list(_mapped(lambda x: addresses[x.base] + x.offset, one.arguments))
    filled[STREAM] = stream
    if watched:
        one.watched(*filled[LEAD:], stream=stream)
    else:
        one.run(*filled)


def _at(base: torch.Tensor | None, pointer: Pointer) -> torch.Tensor:
    """A tensor of one number where `pointer` points."""
    assert base is not None
    start = base.storage_offset() * base.itemsize + pointer.offset
    found = torch.empty(0, dtype=pointer.dtype, device=base.device)
    return found.set_(base.untyped_storage(), start // pointer.dtype.itemsize, (1,), (1,))


def _mapped(change: Callable[[Any], Any], value: Any, kind: type = Pointer) -> Any:
    """`value` with each `kind` in it changed; arguments may be tuples of tuples, named or not."""
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
    """The plan of a recorded call, whose first inputs are `arenas`.

    Raises:
        Unplannable: it did more than allocate and launch, or an argument belongs to none of its tensors.
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
    """Regions of what a call allocated, and bytes of the room that all but its results take together.

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
    """Where a tensor argument lies in the regions of its call; a constant stays as it is."""
    if id(value) in CONSTANTS:
        return value
    if not value.numel():
        return Pointer(0, 0, value.dtype)  # read by nobody
    address = value.data_ptr()
    for start, size, base, offset in regions:
        if start <= address < start + size:
            return Pointer(base, offset + address - start, value.dtype)
    raise Unplannable(f"an argument {tuple(value.shape)} {value.dtype} is no tensor of the call")


_plans: dict[Hashable, Plan | None] = {}


def planned(
    key: Hashable,
    inputs: Sequence[torch.Tensor | None],
    compute: Callable[..., Sequence[torch.Tensor]],
    *arguments: Any,
    arenas: int = 1,
) -> Sequence[torch.Tensor]:
    """Results of `compute(*arguments)`: launched from the plan of an earlier call, if there is one.

    Args:
        key: all that the launches depend on, but for addresses: shapes, strides, dtypes, device, settings.
        inputs: the tensors that `compute` reads and writes. The first, the layer's arena, keeps its address.
        arenas: how many of the first inputs are memory of which kernels take views.
        compute: does nothing on the device but allocate and `launch`; if it does more, each call computes anew.
    """
    addresses = [0 if x is None else x.data_ptr() for x in inputs]
    key = key, tuple([x % 16 for x in addresses])  # kernels are compiled for aligned loads
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
