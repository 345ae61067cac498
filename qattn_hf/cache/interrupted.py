"""Undo failed calls and edits of a cache.

Calls only add packed blocks, and crops only mask tokens of packed blocks. So a snapshot copies little: the bytes before
the blocks. It copies nothing for a first call, or for a call of one token, whose column a crop removes bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from qattn_hf.cache.conversation import Conversation
from qattn_hf.errors import UnsupportedError
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.layer.snapshot import LOST, Restorable, Snapshot


class Call(Snapshot):
    """A call of a model that is running or was interrupted.

    A packed layer that cannot be restored is left `torn` (`Mark`, `Columns`).

    Args:
        layers, conversation: parts of the call's cache.
        caller: id of the module that was called.
        tokens: new tokens of each row.

    Attributes:
        edits: number of changes of each layer before the call.
        entered: True once the decoder inside the model was called.
    """

    def __init__(self, layers: Sequence[Any], conversation: Conversation, caller: int, tokens: int):
        super().__init__([*(layer.before_call(tokens) for layer in layers), conversation.mark()])
        self.caller, self.tokens, self.entered = caller, tokens, False
        self.edits = [layer.edits for layer in layers]

    def enter(self, layers: Sequence[Any], caller: int, tokens: int) -> bool:
        """Return whether a call that begins is part of this one.

        Only the first call by another module is, and only before anything is written.
        """
        if self.entered or caller == self.caller or tokens != self.tokens:
            return False
        self.entered = self.edits == [layer.edits for layer in layers] and not any(
            layer.torn for layer in layers if isinstance(layer, QAttnLayer)
        )
        return self.entered


def unfinished(layers: Sequence[QAttnLayer]) -> UnsupportedError:
    """Return the error for a cache whose packed layers hold results of different operations."""
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
    """A cache whose calls and edits change all layers or none. A failed operation is undone, or the cache is refused.

    Attributes:
        layers: the layers, packed or unpacked.
        conversation: state of the conversation other than keys and values.
    """

    layers: list[Any]
    conversation: Conversation
    _unfinished: Snapshot | None = None  # snapshot before the call or edit that is running or was interrupted

    @contextmanager
    def _editing(self, marks: list[Restorable]) -> Iterator[None]:
        """Context of an edit of all layers. If the edit fails, layers are restored to their marks."""
        for layer, mark in zip(self.layers, marks, strict=True):
            if mark is LOST and isinstance(layer, QAttnLayer):
                layer.own()  # memory may run out here, before anything is lost
        self._unfinished = Snapshot([*marks, self.conversation.mark()])
        try:
            yield
            self._unfinished = None
        except BaseException:
            self.take_back()
            raise

    def _ready(self) -> None:
        """Undo an interrupted operation before an edit begins.

        Raises:
            UnsupportedError: a layer could not be restored.
        """
        self.take_back()
        if any(layer.torn for layer in self.layers):
            raise unfinished(_packed(self.layers))

    def check_whole(self, layers: int | None = None) -> None:
        """Undo an interrupted call or edit, and check that all layers then hold the same calls.

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
        """Return whether `caller`'s call of `tokens` tokens per row begins inside a running call.

        A decoder's call begins inside its model's.
        """
        call = self._unfinished
        return isinstance(call, Call) and call.enter(self.layers, id(caller), tokens)

    @property
    def calling(self) -> bool:
        """Whether a call of a model is running or was interrupted."""
        return isinstance(self._unfinished, Call)

    def begin(self, caller: torch.nn.Module, tokens: int) -> None:
        """Snapshot what a call of `tokens` tokens per row will change. `reserve` must have made room for the tokens."""
        self._unfinished = Call(self.layers, self.conversation, id(caller), tokens)

    def end(self, caller: torch.nn.Module) -> None:
        """Record that `caller`'s call has ended."""
        if isinstance(self._unfinished, Call) and self._unfinished.caller == id(caller):
            self._unfinished = None

    def take_back(self) -> None:
        """Restore the cache to its state before a failed or interrupted call or edit, if there was one."""
        if self._unfinished is not None:
            self._unfinished.put_back((*self.layers, self.conversation))
            self._unfinished = None
