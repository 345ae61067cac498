"""What a call may change of a cache, kept while the call runs, so that one that fails is taken back.

Most of a cache is packed blocks, to which calls only add: what lies behind the closed ones is not read. So little is
copied, and nothing where the cache was empty or one token comes, which a crop removes bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from qattn_hf import rollback
from qattn_hf.changes import Change
from qattn_hf.hybrid_layer import HybridLayer
from qattn_hf.layer import QAttnLayer
from qattn_hf.model_layer import ModelLayer, attributes
from qattn_hf.window_layer import WindowLayer
from qattn_kernels.layout import Geometry


class Mark(NamedTuple):
    """A layer as it was before a call.

    Attributes:
        host: attributes to be set again; all of them where the layer had no tensors.
        kept: bytes of the arena that the call may rewrite. None where there was nothing yet, or one token comes.
        geometry: of `kept`, where it is a whole arena.
    """

    host: dict[str, Any]
    kept: torch.Tensor | None = None
    geometry: Geometry | None = None


class Call:
    """A call of a model that runs, or did not end.

    Args:
        layers: of its cache. caller: id of the module that was called. tokens: new ones of each row.

    Attributes:
        edits: changes of each layer before the call.
        entered: whether the call of the decoder inside of the model has begun.
    """

    def __init__(self, layers: Sequence[Any], caller: int, tokens: int):
        self.caller, self.tokens, self.entered = caller, tokens, False
        self.edits = [layer.edits for layer in layers]
        self._marks = [_mark(layer, tokens) for layer in layers]

    def enter(self, layers: Sequence[Any], caller: int, tokens: int) -> bool:
        """Whether a call that begins is a part of this one: the first by another module, before anything is written."""
        if self.entered or caller == self.caller or tokens != self.tokens:
            return False
        self.entered = self.edits == [layer.edits for layer in layers] and not any(
            layer.torn for layer in layers if isinstance(layer, QAttnLayer)
        )
        return self.entered

    def take_back(self, layers: Sequence[Any]) -> None:
        """Put every layer back to where it was before the call.

        A packed layer for which that is impossible is left `torn`: a compiled step wrote to it, the one new column was
        padding, or the launches of its kernels were interrupted.
        """
        for layer, mark in zip(layers, self._marks, strict=True):
            _take_back(layer, mark)


def _mark(layer: Any, tokens: int) -> Mark:
    """A layer before a call of so many tokens a row."""
    if isinstance(layer, ModelLayer) or not layer.is_initialized:
        return Mark(attributes(layer))
    # what a packed layer counts on the host
    host = {"edits": layer.edits, "torn": layer.torn, "_used": layer._used, "prompt_by": layer.prompt_by}
    if isinstance(layer, HybridLayer):
        host |= layer.states()
    if tokens == 1 or layer._used == 0:
        return Mark(host)
    if isinstance(layer, WindowLayer):  # a long call may move its blocks
        assert layer.arena is not None
        return Mark(host, layer.arena.clone(), layer.geometry)
    return Mark(host, layer.rewritten().clone())


def _take_back(layer: Any, mark: Mark) -> None:
    """Put a layer back to its mark; doing so again changes nothing."""
    if isinstance(layer, ModelLayer) or "_state" in mark.host:
        vars(layer).clear()
    elif layer._used is None:
        layer.torn = True
        return
    elif mark.geometry is not None:
        layer.take(Change(mark.kept, mark.geometry, layer.spec))
    elif mark.kept is not None:
        layer.rewritten().copy_(mark.kept)
    elif mark.host["_used"] == 0:
        layer.reset()
    elif not _crop(layer, layer.edits - mark.host["edits"]):
        layer.torn = True
        return
    vars(layer).update(mark.host)


def _crop(layer: QAttnLayer, columns: int) -> bool:
    """Whether the last columns, each of a call of its own, could be removed."""
    if layer.torn or layer._used is None:
        return False
    held, padded = rollback.columns(layer)
    if held - columns < padded:
        return False
    layer.remove(columns)
    return True
