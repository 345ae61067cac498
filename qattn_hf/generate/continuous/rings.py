"""Layers with a sliding window, or attention in chunks: each row of such a layer has a fixed number of pages.

A block's page is its index in the row modulo that number, so a new block replaces one that the window has left. These
pages are not part of the pool, and no two requests share one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from qattn_hf.generate.continuous.batch import Held
from qattn_hf.generate.continuous.page_layout import by_block, bytes_of, resized
from qattn_hf.generate.continuous.pages import RESERVED, PagedLayer, Rows, Steps
from qattn_hf.model.layer_kinds import WindowLayerSpec
from qattn_kernels.layer.arena import Layout
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import State, Window
from qattn_kernels.step.states import held_back

AT_ONCE = 2  # blocks that leave a row together: each time costs two launches a layer


class Ring(NamedTuple):
    """Pages of a row in all layers with the same window.

    Attributes:
        window: sizes of blocks and of the ring of open tokens.
        sliding_window: most tokens that a query sees.
    """

    window: Window
    sliding_window: int

    @property
    def pages(self) -> int:
        """Pages of a row."""
        return -(-held_back(*self) // self.window.block) + AT_ONCE

    def gone(self, tokens: int) -> int:
        """Return how many blocks have left a row of `tokens` tokens. No later query sees them."""
        blocks = max(0, tokens - held_back(*self)) // self.window.block
        return blocks - blocks % AT_ONCE

    def held(self, request: Held) -> Held:
        """Return a request as its layers with this window have it: without the blocks that have left."""
        gone = self.gone(request.past)
        left = self.gone(request.past + request.tokens) - gone
        first = RESERVED + request.slot * self.pages
        pages = [first + (gone + index) % self.pages for index in range(self.pages)]
        return request._replace(past=request.past - gone * self.window.block, pages=pages, left=left)


def ring_of(spec: LayerSpec) -> Ring | None:
    """Return the ring of a layer's rows; None for a layer without a window, whose pages are in the pool."""
    return Ring(spec.window, spec.sliding_window) if isinstance(spec, WindowLayerSpec) else None


def ring_bytes(layout: Layout) -> int:
    """Return the bytes of a row's ring of pages; 0 for a layer whose pages are in the pool."""
    ring = ring_of(layout.spec)
    return 0 if ring is None else bytes_of(by_block(resized(layout, 1, ring.pages)))


class RingLayer(PagedLayer):
    """A `PagedLayer` with a window, whose pages belong to its rows.

    Args:
        layout, slots, constants: as in `PagedLayer`.
    """

    def __init__(self, layout: Layout, slots: int, device: torch.device, constants: State | None = None):
        assert isinstance(layout.spec, WindowLayerSpec)
        self.ring, self.local = Ring(layout.spec.window, layout.spec.sliding_window), layout.spec.local
        pages = RESERVED + slots * self.ring.pages
        size = bytes_of(by_block(resized(layout, 1, pages)))
        super().__init__(layout, torch.zeros(size, dtype=torch.uint8, device=device), pages, slots, constants)

    def _let_leave(self, rows: Steps) -> None:
        """Free the pages of blocks that the window left with a step over pages in place."""
        if rows.left is not None:
            self.rows["closed"][: len(rows.left.blocks)].sub_(rows.left.blocks)
            self.clear_pages(rows.left.pages)

    @property
    def bytes_of_rows(self) -> int:
        return super().bytes_of_rows + self.buffers[0].nbytes

    def scatter(self, rows: Rows, state: State) -> None:
        if rows.left is not None:
            state["closed"].sub_(rows.left.blocks)
        super().scatter(rows, state)

    def clear_rows(self, slots: torch.Tensor) -> None:
        super().clear_rows(slots)
        self.clear_pages(self._pages_of(slots))

    def copy_row(self, source: int, target: int) -> None:
        super().copy_row(source, target)
        both = torch.tensor([[source], [target]], device=self.buffers[0].device)
        self.copy_pages(*map(self._pages_of, both))

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the pages of rows `slots`, int64 `[N]`: int64 `[N * pages]`."""
        count = self.ring.pages
        return (RESERVED + slots[:, None] * count + torch.arange(count, device=slots.device)).flatten()
