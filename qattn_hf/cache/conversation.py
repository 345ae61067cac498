"""State of a conversation other than keys and values: offsets from columns to positions.

An image takes fewer positions than columns, so Qwen-VL and similar models keep an offset (`rope_deltas`) on a module. A
cache keeps its own, so that several conversations can share the model (`generate/offsets.py`)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from qattn_hf.layer.snapshot import Mark

OFFSET = "rope_deltas"
Offsets = dict[str, torch.Tensor | None]


class Conversation:
    """The offsets of one cache, with the same rows as its layers.

    Attributes:
        offsets: int `[B, 1]` by the name of the module that reads it; None if positions equal columns. Empty before the
            first call.
        prepared: True if `generate` has set the offsets for its first call and may have computed others.
    """

    def __init__(self) -> None:
        self.offsets: Offsets = {}
        self.prepared = False

    @property
    def batch(self) -> int | None:
        """Rows of the offsets; None without any."""
        return next((len(x) for x in self.offsets.values() if x is not None), None)

    def with_rows(self, rows: torch.Tensor) -> Offsets:
        """Return the offsets of the rows `rows`, int64 `[B]`, for `take`."""
        return {name: None if x is None else x.index_select(0, rows.to(x.device)) for name, x in self.offsets.items()}

    def take(self, offsets: Offsets | None) -> None:
        """Apply a result of `with_rows`; None changes nothing."""
        self.offsets = self.offsets if offsets is None else offsets

    def clear(self) -> None:
        """Forget all offsets, as before the first call."""
        self.__dict__ = vars(Conversation())  # one assignment, so an interrupt cannot split it

    def mark(self) -> Mark:
        """Return the offsets before an edit or a call that may fail."""
        return Mark(dict(vars(self)))

    def put_back(self, model: PreTrainedModel, names: tuple[str, ...]) -> None:
        """Copy this conversation's known offsets to the modules of these names."""
        for name in names:
            holder: Any = model.get_submodule(name)
            if name in self.offsets and getattr(holder, OFFSET) is not self.offsets[name]:
                setattr(holder, OFFSET, self.offsets[name])

    def note(self, model: PreTrainedModel, names: tuple[str, ...], rows: int | None) -> None:
        """Store the offsets of the modules of these names after a call of `rows` rows."""
        for name in names:
            holder: Any = model.get_submodule(name)
            found = getattr(holder, OFFSET)
            # offsets of prompts that were repeated for beams
            if found is not None and rows and len(found) != rows and rows % len(found) == 0:
                found = found.repeat_interleave(rows // len(found), 0)
                setattr(holder, OFFSET, found)
            self.offsets[name] = found
