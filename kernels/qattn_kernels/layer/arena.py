"""All state of one layer in one tensor of bytes, and the tensors of `layer.state` as views of it.

So an operator takes one tensor that it changes, whatever the method; a compiled step has one input a layer; and a copy
of a layer is one copy.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch

from qattn_kernels.layer.spec import LayerSpec, decode_spec
from qattn_kernels.layer.state import layer_tensors
from qattn_kernels.layout import Geometry, State, TensorSpec

VARYING = ("batch", "blocks")  # of a geometry: what a compiled step may meet another of
ALIGNMENT = 128  # bytes: a cache line, and more than the widest load asks for


class Layout(NamedTuple):
    """What says where everything lies in the arena of a layer."""

    geometry: Geometry
    spec: LayerSpec

    def encode(self) -> str:
        """All but rows and blocks as text that `decode_layout` reads back: operators take text where they cannot take
        objects. Rows and blocks are numbers there, so that a compiled step serves any number of them.

        One line: Inductor quotes an operator's arguments in comments of the code that it writes."""
        return _encode(self)


@lru_cache(maxsize=1024)
def _encode(layout: Layout) -> str:
    sizes = vars(layout.geometry) | {"dtype": str(layout.geometry.dtype).removeprefix("torch.")}
    fixed = json.dumps({name: x for name, x in sizes.items() if name not in VARYING})
    return f'{{"geometry": {fixed}, "spec": {layout.spec.encode()}}}'


@lru_cache(maxsize=1024)
def decode_layout(text: str, batch: int, blocks: int) -> Layout:
    """The layout that `Layout.encode` wrote as `text`, of so many rows and blocks."""
    parts = json.loads(text)
    sizes = parts["geometry"] | {"batch": batch, "blocks": blocks}
    sizes["dtype"] = getattr(torch, sizes["dtype"])
    return Layout(Geometry(**sizes), decode_spec(json.dumps(parts["spec"])))


@lru_cache(maxsize=1024)
def places(layout: Layout) -> tuple[dict[str, tuple[int, TensorSpec]], int]:
    """Where each state tensor begins, in bytes, with its shape and role, by name; and the bytes of the arena.

    What all rows share comes first, `columns_seen` before all; constants, and codes and scales of packed blocks, last.
    """
    found, end = {}, 0
    for name, tensor in sorted(
        layer_tensors(*layout).items(), key=lambda item: (_stays(*item), item[1].batch_dim is not None)
    ):
        found[name] = end, tensor
        end += -(-tensor.nbytes() // ALIGNMENT) * ALIGNMENT
    return found, end


def _stays(name: str, tensor: TensorSpec) -> bool:
    """Whether calls never rewrite a state tensor: codes and scales of packed blocks, and constants."""
    return name[:2] in ("k.", "v.") and (tensor.block_dim is not None or tensor.batch_dim is None)


@lru_cache(maxsize=1024)
def rewritten_bytes(layout: Layout) -> int:
    """Bytes at the beginning of the arena that calls rewrite: rings, sinks, lengths, masks. What comes behind them is
    constants, and packed blocks, to which calls only add: put back these bytes, and the calls since then have never
    been."""
    return min(begin for name, (begin, tensor) in places(layout)[0].items() if _stays(name, tensor))


class Outline(NamedTuple):
    """What a layer keeps of its layout, in one look-up: that hashes the spec, which takes the host a microsecond.

    Attributes:
        layout: itself. text: `Layout.encode()`.
        n_bytes: of the arena. rewritten: of these, those at its beginning that calls rewrite (`rewritten_bytes`).
    """

    layout: Layout
    text: str
    n_bytes: int
    rewritten: int


@lru_cache(maxsize=1024)
def outline(layout: Layout) -> Outline:
    """The outline of a layout."""
    return Outline(layout, layout.encode(), places(layout)[1], rewritten_bytes(layout))


def columns_seen(arena: torch.Tensor) -> torch.Tensor:
    """The state tensor of this name, which begins every arena: 0-d int64."""
    return arena[:8].view(torch.int64).view(())


_later = threading.local()  # arenas that `zeroed_together` is to zero


@contextmanager
def zeroed_together() -> Iterator[None]:
    """Context at whose end all arenas are zeroed that `empty_bytes` made in it, by one kernel: a launch for each takes
    the host longer."""
    arenas: list[torch.Tensor] = []
    _later.arenas = arenas
    with torch.inference_mode(False):  # see `empty_bytes`
        try:
            yield
        finally:
            _later.arenas = None
            if arenas:
                torch._foreach_zero_([arena.view(torch.int64) for arena in arenas])


def empty_arena(layout: Layout, device: torch.device) -> torch.Tensor:
    """uint8 zeros: the state of rows that have seen nothing, without constants."""
    return empty_bytes(places(layout)[1], device, True)


def empty_bytes(n_bytes: int, device: torch.device, at_once: bool) -> torch.Tensor:
    """An arena of so many bytes. Unless `at_once`, they may be zeros at the end of `zeroed_together` only."""
    later = getattr(_later, "arenas", None)
    if not at_once and later is not None:
        later.append(torch.empty(n_bytes, dtype=torch.uint8, device=device))
        return later[-1]
    with torch.inference_mode(False):  # else what began under inference_mode could not be written outside it
        return torch.zeros(n_bytes, dtype=torch.uint8, device=device)


def views(arena: torch.Tensor, layout: Layout) -> State:
    """The state tensors by name; writing to them writes to the arena."""
    placed = places(layout)[0]
    whole = {dtype: arena.view(dtype) for dtype in {tensor.dtype for _, tensor in placed.values()}}
    return {name: _view(whole[tensor.dtype], begin, tensor) for name, (begin, tensor) in placed.items()}


def view_of(arena: torch.Tensor, layout: Layout, name: str) -> torch.Tensor:
    """One of `views`."""
    begin, tensor = places(layout)[0][name]
    return _view(arena.view(tensor.dtype), begin, tensor)


def _view(whole: torch.Tensor, begin: int, tensor: TensorSpec) -> torch.Tensor:
    """A state tensor that begins `begin` bytes behind the start of the arena, which `whole` is in its dtype."""
    first = begin // tensor.dtype.itemsize
    return whole[first : first + math.prod(tensor.shape)].view(tensor.shape)
