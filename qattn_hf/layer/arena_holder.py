"""The tensor of bytes that is the state of a layer: who owns it, and what copies and pickles do with it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from qattn_hf.errors import UnsupportedError
from qattn_hf.layer.handle import Written
from qattn_hf.layer.snapshot import Mark
from qattn_hf.model.device import capturing
from qattn_kernels.layer.arena import Layout, Outline, empty_arena, empty_bytes, outline, view_of, views
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import needs_constants
from qattn_kernels.layout import Geometry, State


class Writing:
    """Context of a call that writes to a layer (`ArenaHolder.writing`).

    If the call fails, the layer is put back to before it. Where kernels take one token more, as in the call before,
    nothing is copied for that, since their plan allocates all memory before it launches the first: what comes between
    its launches, as an interrupt does, leaves the layer `torn`. A class, since steps wait for it in every layer, and
    a generator's context takes the host longer.
    """

    __slots__ = ("kept", "layer", "planned", "tokens")

    def __init__(self, layer: ArenaHolder, tokens: int):
        self.layer, self.tokens = layer, tokens
        self.kept: torch.Tensor | None = None
        again = tokens == 1 and layer._stepped == layer.blocks and bool(layer._used)
        self.planned = again and layer.spec.impl == "triton"

    def __enter__(self) -> None:
        self.layer.check_ended()
        if not self.planned and self.layer._used != 0:
            self.kept = self.layer.rewritten().clone()
        self.layer.torn = True

    def __exit__(self, error: type[BaseException] | None, *traceback: Any) -> None:
        layer = self.layer
        if error is None:
            layer._stepped, layer.torn = layer.blocks if self.tokens == 1 else None, False
        elif not self.planned:
            layer.rewritten().zero_() if self.kept is None else layer.rewritten().copy_(self.kept)
            layer.torn = False


class ArenaHolder:
    """What `QAttnLayer` knows of its memory.

    Attributes:
        arena: uint8, all state tensors of the layer; None before the first call.
        borrowed: whether others read the arena too, so that it is copied before the first write (`own`).
        moves: how often tensors were replaced, which invalidates captured steps.
        shared: whether other layers read the keys and values too (`kv_sharing.py`).
        constants: state tensors that no call writes, by name, of the layer's model (`model_constants`). Without,
            every channel gets its code alone, and none is multiplied by anything.
    """

    geometry: Geometry
    spec: LayerSpec
    blocks: int
    edits: int
    torn: bool
    _used: int | None
    _stepped: int | None = None  # capacity, in blocks, of the last call of one token
    arena: torch.Tensor | None = None
    borrowed = False
    moves = 0
    shared = False
    constants: State | None = None
    _state: State | None = None  # `state`, once it was asked for
    _layout = ""  # where the tensors lie in the arena
    _rewritten = 0  # bytes of `rewritten`

    @property
    def state(self) -> State:
        """Views of the arena by name; before there is one, `columns_seen` alone. Made when they are asked for, which
        most calls do not: it takes the host as long as a short one."""
        if self._state is None:
            with torch.inference_mode(False):  # else what began under inference_mode could not be written outside it
                if self.arena is None:
                    self._state = {"columns_seen": torch.zeros((), dtype=torch.int64, device="cpu")}
                else:
                    self._state = views(self.arena, Layout(self.geometry, self.spec))
        return self._state

    def _no_tensor(self) -> NoReturn:
        raise UnsupportedError(
            "a packed layer has codes, and no tensor of keys or values that could be read or replaced: what prunes or "
            "edits a cache's tokens (kvpress, for one) needs a stock cache, unpatch(model)"
        )

    def _take_no_tensor(self, tensor: Any) -> None:
        if tensor is not None:  # None is what `CacheLayerMixin` begins with
            self._no_tensor()

    keys = values = property(_no_tensor, _take_no_tensor)  # else a tensor put there would be kept and never read

    def empty(self, layout: Layout, device: torch.device) -> torch.Tensor:
        """An arena of this layout whose rows have seen nothing."""
        return self._with_constants(empty_arena(layout, device), layout)

    def _allocate(self, known: Outline, device: torch.device) -> None:
        """Take an empty arena, of the present geometry and spec, which is zeroed when all of `zeroed_together` are."""
        arena = empty_bytes(known.n_bytes, device, at_once=needs_constants(known.layout.spec))
        self._adopt(self._with_constants(arena, known.layout), known)

    def clear(self) -> None:
        """Let all rows hold no tokens, in place."""
        self.own()
        (self.state["columns_seen"] if self.arena is None else self.arena).zero_()
        if self.arena is not None:
            self._with_constants(self.arena, Layout(self.geometry, self.spec))

    def _with_constants(self, arena: torch.Tensor, layout: Layout) -> torch.Tensor:
        if layout.spec.compute.equalize and not self.constants:
            view_of(arena, layout, "k.equalizer").fill_(1)
        for name, tensor in (self.constants or {}).items():
            view_of(arena, layout, name).copy_(tensor)
        return arena

    def own(self) -> None:
        """Copy the arena if it is borrowed, before a write.

        Raises:
            UnsupportedError: while a CUDA graph is captured, which would copy at each replay.
        """
        if not self.borrowed:
            return
        if capturing():
            raise UnsupportedError(
                "a loaded cache is copied at its first call, which no CUDA graph can hold: make that call before"
            )
        assert self.arena is not None
        with torch.inference_mode(False):  # else what began under inference_mode could not be written outside it
            self._adopt(self.arena.clone(), outline(Layout(self.geometry, self.spec)))

    def _adopt(self, arena: torch.Tensor, known: Outline) -> None:
        """Take an arena with this outline: mark its address as static for compiled steps, and count the move for
        captured steps. An interrupt comes before or after."""
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(arena)
        geometry, spec = known.layout
        self.__dict__.update(
            spec=spec, geometry=geometry, blocks=geometry.blocks, arena=arena, borrowed=False, moves=self.moves + 1,
            _state=None, _layout=known.text, _rewritten=known.rewritten,
        )  # fmt: skip

    def check_ended(self) -> None:
        """Check that no change of the layer was left unfinished.

        Raises:
            UnsupportedError: the layer is `torn`.
        """
        if self.torn:
            raise UnsupportedError(
                "an earlier call or edit was interrupted inside this layer, whose state is incomplete: reset() empties "
                "it, or take a fresh cache"
            )

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Context of a change in place. An exception leaves the layer `torn`: its cache puts it back (`snapshot.py`).

        Raises:
            UnsupportedError: the layer is `torn`.
        """
        self.check_ended()
        self.own()
        self.torn = True
        yield
        self.edits, self.torn = self.edits + 1, False

    def mark(self, bytes_too: bool) -> Mark:
        """The layer before an operation that replaces its tensors; `bytes_too`: that changes `rewritten` in place."""
        kept = None
        if bytes_too and self.arena is not None:
            self.own()  # a borrowed arena cannot be written, not even to put it back
            kept = self.rewritten().clone()
        return Mark({**vars(self), "_state": None}, kept)

    def rewritten(self) -> torch.Tensor:
        """The bytes of the arena that calls rewrite, a view (`layer.arena.rewritten_bytes`)."""
        assert self.arena is not None
        return self.arena[: self._rewritten]

    def written(self, past: int, by_sdpa: bool = False) -> Written | None:
        """What layers that share the keys and values of a call which begins now need to attend to them; None where
        there are no such layers. Arguments as in `Written`."""
        if not self.shared or self.arena is None:
            return None
        return Written(self.arena, self.blocks, past, self.rewritten().clone(), by_sdpa)

    def writing(self, tokens: int) -> Writing:
        """Context of a call that writes so many tokens, of which the host knows how full the layer is."""
        return Writing(self, tokens)

    def _fields(self) -> dict[str, Any]:
        """Without the views, which a pickle would write out one by one."""
        return {**vars(self), "_state": self._state if self.arena is None else None}

    def __getstate__(self) -> dict[str, Any]:
        if not self.borrowed or self.arena is None:
            return self._fields()
        # a pickle of a borrowed arena would hold all of the file that it lies in
        return {**self._fields(), "arena": self.arena.clone(), "borrowed": False}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copies of a layer share a borrowed arena, until one of them writes, and constants."""
        if self.borrowed:
            memo[id(self.arena)] = self.arena
        memo[id(self.constants)] = self.constants
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self._fields(), memo))
        return twin
