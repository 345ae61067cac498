"""Calls and edits of a cache that fail: the cache is put back to before them.

Calls only add packed blocks, and crops only mask tokens of packed blocks. So a snapshot copies little: the bytes before
the blocks, and none for a first call or a call of one token, whose column a crop removes bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from qattn_hf.cache.conversation import Conversation
from qattn_hf.errors import UnsupportedError
from qattn_hf.layer import rollback
from qattn_hf.layer.hybrid_layer import HybridLayer
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.layer.model_layer import ModelLayer
from qattn_hf.layer.snapshot import LOST, Mark, Restorable, Snapshot
from qattn_hf.layer.window_layer import WindowLayer


class Columns(NamedTuple):
    """A packed layer before a call of one token, or before its first call: nothing is copied.

    Attributes:
        host: attributes that the call changes on the host.
    """

    host: dict[str, Any]

    def put_back(self, layer: Any) -> None:
        if self.host["_used"] == 0:
            layer.reset()
        elif not _crop(layer, layer.edits - self.host["edits"]):
            layer.torn = True
            return
        vars(layer).update(self.host)


class Call(Snapshot):
    """A call of a model that runs, or did not end.

    A packed layer that cannot be put back is left `torn`: a compiled step wrote to it, the one new column was padding,
    or the launches of its kernels were interrupted.

    Args:
        layers, conversation: of its cache. caller: id of the module that was called. tokens: new ones of each row.

    Attributes:
        edits: changes of each layer before the call.
        entered: whether the call of the decoder inside of the model has begun.
    """

    def __init__(self, layers: Sequence[Any], conversation: Conversation, caller: int, tokens: int):
        super().__init__([*(_mark(layer, tokens) for layer in layers), conversation.mark()])
        self.caller, self.tokens, self.entered = caller, tokens, False
        self.edits = [layer.edits for layer in layers]

    def enter(self, layers: Sequence[Any], caller: int, tokens: int) -> bool:
        """Whether a call that begins is a part of this one: the first by another module, before anything is written."""
        if self.entered or caller == self.caller or tokens != self.tokens:
            return False
        self.entered = self.edits == [layer.edits for layer in layers] and not any(
            layer.torn for layer in layers if isinstance(layer, QAttnLayer)
        )
        return self.entered


class Written(NamedTuple):
    """A packed layer before a call of several tokens.

    Attributes:
        mark: attributes and bytes of the layer.
    """

    mark: Mark

    def put_back(self, layer: Any) -> None:
        if layer._used is None:
            layer.torn = True
        else:
            self.mark.put_back(layer)


def _mark(layer: Any, tokens: int) -> Restorable:
    """A layer before a call of so many tokens a row."""
    if isinstance(layer, ModelLayer) or not layer.is_initialized:
        return layer.mark(bytes_too=False)
    if tokens == 1 or layer._used == 0:
        host = {"edits": layer.edits, "torn": layer.torn, "_used": layer._used, "prompt_by": layer.prompt_by}
        return Columns(host | layer.states() if isinstance(layer, HybridLayer) else host)
    if isinstance(layer, WindowLayer):  # a call may move its blocks
        mark = layer.mark(bytes_too=False)
        return Written(mark._replace(kept=mark.host["arena"].clone()))
    return Written(layer.mark(bytes_too=True))


def _crop(layer: QAttnLayer, columns: int) -> bool:
    """Whether the last columns, each of a call of its own, could be removed. The layer is `torn` until the caller has
    set its attributes: how many columns to remove is known once."""
    if layer.torn or layer._used is None:
        return False
    held, padded = rollback.columns(layer)
    if held - columns < padded:
        return False
    layer.own()
    layer.torn = True
    if columns:
        layer.cut(columns)
    return True


def unfinished(layers: Sequence[QAttnLayer]) -> UnsupportedError:
    """The error of a cache whose packed layers hold the outcome of different operations."""
    torn = any(layer.torn for layer in layers)
    lengths = sorted({int(layer.get_seq_length()) for layer in layers})
    mend = f"cache.crop({lengths[0]}) removes what only some have; " if not torn and len(lengths) > 1 else ""
    return UnsupportedError(
        f"an earlier call or edit of this cache was interrupted, and its layers hold {' or '.join(map(str, lengths))} "
        f"columns: {mend}cache.reset() empties it, or take a fresh cache"
    )


def _packed(layers: Sequence[Any]) -> list[QAttnLayer]:
    return [layer for layer in layers if isinstance(layer, QAttnLayer)]


class Recoverable:
    """A cache whose calls and edits are of all layers or of none: what fails is put back, or the cache is refused.

    Attributes:
        layers: the layers, packed or of the model's own. conversation: what the cache keeps beside them.
    """

    layers: list[Any]
    conversation: Conversation
    _unfinished: Snapshot | None = None  # before the call or edit that runs, or was interrupted

    @contextmanager
    def _editing(self, marks: list[Restorable]) -> Iterator[None]:
        """Context of an edit of all layers. If the edit fails, layers are put back to their marks."""
        for layer, mark in zip(self.layers, marks, strict=True):
            if mark is LOST and isinstance(layer, QAttnLayer):
                layer.own()  # where memory may run out, before anything is lost
        self._unfinished = Snapshot([*marks, self.conversation.mark()])
        try:
            yield
            self._unfinished = None
        except BaseException:
            self.take_back()
            raise

    def _ready(self) -> None:
        """Take back what was interrupted before an edit begins.

        Raises:
            UnsupportedError: a layer could not be put back.
        """
        self.take_back()
        if any(layer.torn for layer in self.layers):
            raise unfinished(_packed(self.layers))

    def check_whole(self, layers: int | None = None) -> None:
        """Take back a call or edit that was interrupted, and check that the layers then hold the same calls.

        Args:
            layers: number of layers that the model uses; all by default.

        Raises:
            UnsupportedError: the layers disagree; the message says how to repair the cache.
        """
        self.take_back()
        used = _packed(self.layers[:layers])
        if any([layer.torn for layer in used]) or len({layer.edits for layer in used}) > 1:
            raise unfinished(used)

    def within_call(self, caller: torch.nn.Module, tokens: int) -> bool:
        """Whether the `caller`'s call of so many tokens a row begins inside of one that runs: the decoder's, inside of
        its model's."""
        call = self._unfinished
        return isinstance(call, Call) and call.enter(self.layers, id(caller), tokens)

    @property
    def calling(self) -> bool:
        """Whether a call of a model runs, or was interrupted."""
        return isinstance(self._unfinished, Call)

    def begin(self, caller: torch.nn.Module, tokens: int) -> None:
        """Note that a call of so many tokens a row begins, for which `reserve` made room, and keep what it changes."""
        self._unfinished = Call(self.layers, self.conversation, id(caller), tokens)

    def end(self, caller: torch.nn.Module) -> None:
        """Note that the `caller`'s call has ended."""
        if isinstance(self._unfinished, Call) and self._unfinished.caller == id(caller):
            self._unfinished = None

    def take_back(self) -> None:
        """Put the cache back to before the call or edit that failed or was interrupted, if one was."""
        if self._unfinished is not None:
            self._unfinished.put_back((*self.layers, self.conversation))
            self._unfinished = None
