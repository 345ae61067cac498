"""What a layer has in a page and what in a row, and the bytes of both, from the layer's layout alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from qattn_kernels.formats.traits import MixedHeads
from qattn_kernels.layer.arena import ALIGNMENT, Layout
from qattn_kernels.layer.state import layer_tensors, row_tensors
from qattn_kernels.layout import TensorSpec


def by_block(layout: Layout) -> dict[str, TensorSpec]:
    """Return the per-block state tensors of a page. Masks of a sink pool are in `by_row` instead."""
    own = {"dropped"} if layout.spec.sink_pool.num else set()
    return {name: x for name, x in layer_tensors(*layout).items() if x.block_dim is not None and name not in own}


def by_row(layout: Layout) -> dict[str, TensorSpec]:
    """Return the state tensors of a row without its pages: lengths, the ring of open tokens and the sink pool.

    With a sink pool the masks of all blocks are part of the row. They change when a sink leaves the pool, so requests
    with other sinks could not share them.
    """
    own = layer_tensors(*layout).keys() - by_block(layout).keys()
    return {name: x for name, x in layer_tensors(*layout).items() if name in own and x.batch_dim is not None}


def shares_pages(layout: Layout) -> bool:
    """Return whether another request may begin with the pages of whole blocks alone.

    This holds if no tokens stay open after a block and no row has a mean, a scale or sinks.
    """
    window = layout.spec.window
    return window.span == window.block and window.residual == 0 and not layout.spec.sink_pool.num and not _own(layout)


def keeps_rows(layout: Layout) -> bool:
    """Return whether a row cropped to whole blocks equals a row that read no further tokens.

    Another request may then begin with the row and its pages. Means, scales and ranks must not depend on later tokens,
    and sinks must be chosen block by block.
    """
    pool = layout.spec.sink_pool
    chosen_by_block = pool.prefill == "group" and pool.select != "attention"
    return chosen_by_block and layout.spec.window.span == layout.spec.window.block and not _own(layout)


def _own(layout: Layout) -> set[str]:
    """Return the names of a row's state tensors other than lengths, open tokens, sinks and `settled` ones: means,
    shared scales and ranks of heads, which the row's first tokens determined."""
    rows = by_row(layout)
    tokens = {name for name in rows if ".ring" in name or "sink" in name}
    return rows.keys() - row_tensors(*layout).keys() - tokens - settled(layout).keys()


def settled(layout: Layout) -> dict[str, list[int]]:
    """Return the state tensors, `[Hkv]` by name, that have the same values in all rows with a closed block."""
    spec, heads = layout.spec, layout.geometry.heads
    sides = ((side, fmt) for side, fmt in (("k", spec.k), ("v", spec.v)) if isinstance(fmt, MixedHeads))
    return {f"{side}.{name}": values for side, fmt in sides for name, values in fmt.settled(heads).items()}


def resized(layout: Layout, batch: int, blocks: int) -> Layout:
    """Return the layout for `batch` rows and `blocks` blocks."""
    return layout._replace(geometry=replace(layout.geometry, batch=batch, blocks=blocks))


def bytes_of(tensors: dict[str, TensorSpec]) -> int:
    """Return the bytes of consecutive tensors, each aligned to `ALIGNMENT`."""
    return sum(-(-x.nbytes() // ALIGNMENT) * ALIGNMENT for x in tensors.values())


def page_bytes(layout: Layout) -> int:
    """Return the bytes of one block of a layer, over all KV heads, rounded up to `ALIGNMENT`."""
    exact = sum(x.nbytes() for x in by_block(resized(layout, 1, 1)).values())
    return -(-exact // ALIGNMENT) * ALIGNMENT


def row_bytes(layout: Layout, blocks: int = 1) -> int:
    """Return the bytes of a request in a layer without its pages, for at most `blocks` blocks."""
    return bytes_of(by_row(resized(layout, 1, blocks)))


def mean_page_bytes(layouts: Sequence[Layout]) -> int:
    """Return the mean page bytes of the layers, rounded up to `ALIGNMENT`.

    The result covers at least the alignment between a layer's tensors.
    """
    mean = math.ceil(sum(map(page_bytes, layouts)) / len(layouts))
    boundaries = max(len(by_block(layout)) for layout in layouts) * ALIGNMENT
    return max(-(-mean // ALIGNMENT) * ALIGNMENT, boundaries)
