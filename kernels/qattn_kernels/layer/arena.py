"""The whole state of a layer in one tensor of bytes, with the tensors of `layer.state` as views.

An operator then mutates one tensor for every method, a compiled step has one input per layer, and copying a layer is
one copy."""

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

VARYING = ("batch", "blocks")  # sizes of a geometry that may vary within one compiled step
ALIGNMENT = 128  # bytes: a cache line, and more than the widest load needs


class Layout(NamedTuple):
    """Sizes and spec of a layer. Together they determine where each tensor is in the arena."""

    geometry: Geometry
    spec: LayerSpec

    def encode(self) -> str:
        """Return the layout without rows and blocks as one line of text, the inverse of `decode_layout`.

        Operators take text because they cannot take objects. Rows and blocks are separate numbers, so one compiled step
        serves any number of them. Inductor quotes operator arguments in code comments, so the text must be a single
        line."""
        return _encode(self)


@lru_cache(maxsize=1024)
def _encode(layout: Layout) -> str:
    sizes = vars(layout.geometry) | {"dtype": str(layout.geometry.dtype).removeprefix("torch.")}
    fixed = json.dumps({name: x for name, x in sizes.items() if name not in VARYING})
    return f'{{"geometry": {fixed}, "spec": {layout.spec.encode()}}}'


@lru_cache(maxsize=1024)
def decode_layout(text: str, batch: int, blocks: int) -> Layout:
    """Return the layout that `Layout.encode` wrote as `text`, with `batch` rows and `blocks` blocks."""
    parts = json.loads(text)
    sizes = parts["geometry"] | {"batch": batch, "blocks": blocks}
    sizes["dtype"] = getattr(torch, sizes["dtype"])
    return Layout(Geometry(**sizes), decode_spec(json.dumps(parts["spec"])))


@lru_cache(maxsize=1024)
def places(layout: Layout) -> tuple[dict[str, tuple[int, TensorSpec]], int]:
    """Return the start byte, shape and role of each state tensor by name, and the bytes of the arena.

    Tensors that all rows share come first, starting with `columns_seen`. Constants, and codes and scales of packed
    blocks, come last."""
    found, end = {}, 0
    for name, tensor in sorted(
        layer_tensors(*layout).items(), key=lambda item: (_stays(*item), item[1].batch_dim is not None)
    ):
        found[name] = end, tensor
        end += -(-tensor.nbytes() // ALIGNMENT) * ALIGNMENT
    return found, end


def _stays(name: str, tensor: TensorSpec) -> bool:
    """Return whether calls never rewrite a state tensor: codes and scales of packed blocks, and constants."""
    return name[:2] in ("k.", "v.") and (tensor.block_dim is not None or tensor.batch_dim is None)


@lru_cache(maxsize=1024)
def rewritten_bytes(layout: Layout) -> int:
    """Return the number of bytes at the arena's beginning that calls rewrite: rings, sinks, lengths, masks.

    The rest holds constants and packed blocks, to which calls only add. Restoring the first bytes therefore undoes all
    calls made after they were copied."""
    return min(begin for name, (begin, tensor) in places(layout)[0].items() if _stays(name, tensor))


class Outline(NamedTuple):
    """Facts about a layout in one look-up. Hashing the spec costs the host a microsecond.

    Attributes:
        layout: the layout.
        text: `Layout.encode()`.
        n_bytes: bytes of the arena.
        rewritten: bytes at its beginning that calls rewrite (`rewritten_bytes`).
    """

    layout: Layout
    text: str
    n_bytes: int
    rewritten: int


@lru_cache(maxsize=1024)
def outline(layout: Layout) -> Outline:
    """Return the outline of a layout."""
    return Outline(layout, layout.encode(), places(layout)[1], rewritten_bytes(layout))


def columns_seen(arena: torch.Tensor) -> torch.Tensor:
    """Return the state tensor `columns_seen`, 0-d int64, at the start of every arena."""
    return arena[:8].view(torch.int64).view(())


_later = threading.local()  # arenas that `zeroed_together` will zero


@contextmanager
def zeroed_together() -> Iterator[None]:
    """Context that zeroes all arenas made by `empty_bytes` inside it with a single kernel at its end.

    Separate launches would cost more host time."""
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
    """Return an arena of uint8 zeros: rows without tokens, and no constants."""
    return empty_bytes(places(layout)[1], device, True)


def empty_bytes(n_bytes: int, device: torch.device, at_once: bool) -> torch.Tensor:
    """Return an arena of `n_bytes` zeros. Unless `at_once`, inside `zeroed_together`, it is zeroed at the end of that
    context."""
    later = getattr(_later, "arenas", None)
    if not at_once and later is not None:
        later.append(torch.empty(n_bytes, dtype=torch.uint8, device=device))
        return later[-1]
    with torch.inference_mode(False):  # tensors made under inference_mode cannot be written outside it
        return torch.zeros(n_bytes, dtype=torch.uint8, device=device)


def views(arena: torch.Tensor, layout: Layout) -> State:
    """Return the state tensors by name, as views that write to the arena."""
    placed = places(layout)[0]
    whole = {dtype: arena.view(dtype) for dtype in {tensor.dtype for _, tensor in placed.values()}}
    return {name: _view(whole[tensor.dtype], begin, tensor) for name, (begin, tensor) in placed.items()}


def view_of(arena: torch.Tensor, layout: Layout, name: str) -> torch.Tensor:
    """Return one tensor of `views`."""
    begin, tensor = places(layout)[0][name]
    return _view(arena.view(tensor.dtype), begin, tensor)


def _view(whole: torch.Tensor, begin: int, tensor: TensorSpec) -> torch.Tensor:
    """Return the state tensor at `begin` bytes after the arena's start. `whole` is the arena in the tensor's dtype."""
    first = begin // tensor.dtype.itemsize
    return whole[first : first + math.prod(tensor.shape)].view(tensor.shape)
