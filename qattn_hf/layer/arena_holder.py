"""The tensor of bytes that holds a layer's state: its ownership, copies and pickles."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from qattn_hf.errors import UnsupportedError
from qattn_hf.layer.handle import Written
from qattn_hf.layer.rollback import Columns
from qattn_hf.layer.snapshot import Mark, Restorable
from qattn_hf.model.device import capturing, compiling
from qattn_kernels.layer.arena import Layout, Outline, empty_arena, empty_bytes, outline, view_of, views
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import needs_constants
from qattn_kernels.layout import Geometry, State


class Writing:
    """Context of an operation that writes to a layer in place (`ArenaHolder.writing`). If it fails, the layer is
    restored to its `before`.

    A planned one-token step has no `before`: its plan allocates all memory before the first launch, so only an
    interrupt between launches can stop it. Such an interrupt leaves the layer `torn`. This is a class because every
    layer's step waits for it, and a generator context takes the host longer.
    """

    __slots__ = ("before", "layer", "stepped")

    def __init__(self, layer: ArenaHolder, before: Mark | None, stepped: int | None = None):
        self.layer, self.before, self.stepped = layer, before, stepped

    def __enter__(self) -> Mark | None:
        self.layer.torn = True
        return self.before

    def __exit__(self, error: type[BaseException] | None, *traceback: Any) -> None:
        if error is None:
            self.layer._stepped, self.layer.torn = self.stepped, False
        elif self.before is not None:
            self.before.put_back(self.layer)


class ArenaHolder:
    """Memory of a `QAttnLayer`; serves its calls as `layer.step.Memory`.

    Attributes:
        arena: uint8, all state tensors of the layer; None before the first call.
        borrowed: True if others read the arena too; it is then copied before the first write (`own`).
        moves: how often tensors were replaced; a replacement invalidates captured steps.
        shared: True if other layers read the same keys and values (`kv_sharing.py`).
        constants: the model's state tensors that no call writes, by name (`model_constants`). Without them, keys are
            neither equalized nor their errors compensated.
    """

    geometry: Geometry
    spec: LayerSpec
    blocks: int
    edits: int
    torn: bool
    prompt_by: str
    _used: int | None
    _stepped: int | None = None  # capacity, in blocks, of the last one-token call
    arena: torch.Tensor | None = None
    borrowed = False
    moves = 0
    shared = False
    table = None  # as `layer.step.Memory` has it: blocks are in the arena
    constants: State | None = None
    _state: State | None = None  # `state`, once requested
    _layout = ""  # layout of the tensors in the arena, as text
    _rewritten = 0  # bytes of `rewritten`

    @property
    def state(self) -> State:
        """Views of the arena by name, or only `columns_seen` before there is an arena.

        The views are made on demand, because making them takes the host as long as a short call. Most calls do not need
        them.
        """
        if self._state is None:
            with torch.inference_mode(False):  # tensors made under inference_mode could not be written outside it
                if self.arena is None:
                    self._state = {"columns_seen": torch.zeros((), dtype=torch.int64, device="cpu")}
                else:
                    self._state = views(self.arena, Layout(self.geometry, self.spec))
        return self._state

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The arena, as `layer.step.Memory` has it."""
        return () if self.arena is None else (self.arena,)

    @property
    def plan_key(self) -> tuple[str, int]:
        """Layout and blocks of the arena, as `layer.step.Memory` has them."""
        return self._layout, self.blocks

    def _no_tensor(self) -> NoReturn:
        raise UnsupportedError(
            "a packed layer stores codes, so its keys and values cannot be replaced: libraries that edit them, such as "
            "kvpress, need a stock cache, unpatch(model). cache.read and cache.keep prune a packed cache"
        )

    def _take_no_tensor(self, tensor: Any) -> None:
        if tensor is not None:  # `CacheLayerMixin` starts with None
            self._no_tensor()

    keys = values = property(_no_tensor, _take_no_tensor)  # a tensor assigned here would be kept and never read

    def empty(self, layout: Layout, device: torch.device) -> torch.Tensor:
        """Return an arena of this layout with empty rows."""
        return self._with_constants(empty_arena(layout, device), layout)

    def _allocate(self, known: Outline, device: torch.device) -> None:
        """Take an empty arena for the current geometry and spec. Inside `zeroed_together`, it is zeroed with the
        others."""
        arena = empty_bytes(known.n_bytes, device, at_once=needs_constants(known.layout.spec))
        self._adopt(self._with_constants(arena, known.layout), known)

    def clear(self) -> None:
        """Empty all rows in place."""
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
            UnsupportedError: a CUDA graph is being captured, which would repeat the copy at each replay.
        """
        if not self.borrowed:
            return
        if capturing():
            raise UnsupportedError(
                "the first call copies a loaded cache, which a CUDA graph cannot capture: make that call before capture"
            )
        assert self.arena is not None
        with torch.inference_mode(False):  # tensors made under inference_mode could not be written outside it
            self._adopt(self.arena.clone(), outline(Layout(self.geometry, self.spec)))

    def _adopt(self, arena: torch.Tensor, known: Outline) -> None:
        """Take an arena with this outline in one step: an interrupt comes before or after it.

        Its address is marked as static for compiled steps, and `moves` is increased for captured steps.
        """
        if not compiling():
            torch._dynamo.mark_static_address(arena)
        geometry, spec = known.layout
        self.__dict__.update(
            spec=spec, geometry=geometry, blocks=geometry.blocks, arena=arena, borrowed=False, moves=self.moves + 1,
            _state=None, _layout=known.text, _rewritten=known.rewritten,
        )  # fmt: skip

    def check_ended(self) -> None:
        """Check that every change of the layer was finished.

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
        """Context of a change in place. An exception leaves the layer `torn`, and its cache restores it
        (`snapshot.py`).

        Raises:
            UnsupportedError: the layer is `torn`.
        """
        self.check_ended()
        self.own()
        self.torn = True
        yield
        self.edits, self.torn = self.edits + 1, False

    def mark(self, bytes_too: bool) -> Mark:
        """Return the layer's state before an operation that replaces its tensors.

        Args:
            bytes_too: True if the operation also changes `rewritten` in place.
        """
        bytes_too = bytes_too and self.arena is not None
        if bytes_too:
            self.own()  # a borrowed arena must not be written, not even to restore it
        host = {**vars(self), "_state": None}
        if bytes_too and self._used == 0:
            return Mark(host, zeros=self._rewritten)
        return Mark(host, self.rewritten().clone() if bytes_too else None)

    def counts(self) -> dict[str, Any]:
        """Return the attributes that a call of one token changes on the host."""
        return {"edits": self.edits, "torn": self.torn, "_used": self._used, "prompt_by": self.prompt_by}

    def before_call(self, tokens: int) -> Restorable:
        """Return the layer's state before a call of `tokens` tokens per row."""
        if tokens == 1 and self.arena is not None and self._used != 0:
            return Columns(self.counts())
        return self.mark(bytes_too=True)

    def rewritten(self) -> torch.Tensor:
        """View of the bytes of the arena that calls rewrite (`layer.arena.rewritten_bytes`)."""
        assert self.arena is not None
        return self.arena[: self._rewritten]

    def written(self, past: int, before: Mark | None, by_sdpa: bool = False) -> Written | None:
        """Return what other layers need to attend to the call that begins now; None if no layer shares the keys and
        values.

        Args:
            before: the layer before the call, as `writing` made it.
            past, by_sdpa: as in `Written`.
        """
        if not self.shared or self.arena is None:
            return None
        kept = None if before is None else before.kept
        return Written(self.arena, self.blocks, past, self.rewritten().clone() if kept is None else kept, by_sdpa)

    def writing(self, tokens: int) -> Writing:
        """Return the context of a call that writes `tokens` tokens; the host knows how full the layer is.

        Raises:
            UnsupportedError: the layer is `torn`.
        """
        self.check_ended()
        again = tokens == 1 and self._stepped == self.blocks and bool(self._used)
        planned = again and self.spec.impl == "triton"
        return Writing(self, None if planned else self.mark(bytes_too=True), self.blocks if tokens == 1 else None)

    def _fields(self) -> dict[str, Any]:
        """The layer's attributes without views, which a pickle would store one by one."""
        return {**vars(self), "_state": self._state if self.arena is None else None}

    def __getstate__(self) -> dict[str, Any]:
        if not self.borrowed or self.arena is None:
            return self._fields()
        # a pickle of a borrowed arena would contain the whole mapped file
        return {**self._fields(), "arena": self.arena.clone(), "borrowed": False}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the layer. Copies share constants, and share a borrowed arena until one of them writes."""
        if self.borrowed:
            memo[id(self.arena)] = self.arena
        memo[id(self.constants)] = self.constants
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self._fields(), memo))
        return twin
