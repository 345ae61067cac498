"""How large a pool of packed pages is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from qattn_hf.generate.continuous.pages import keeps_rows, mean_page_bytes, row_bytes, shares_pages
from qattn_kernels.layer.arena import Layout

# Off a GPU the pool lies in the memory of all other programs, and a CPU answers few requests at once.
HOST_BYTES = 2**30
HOST_TOKENS = 32768
SPARE_BLOCKS = 2  # that transformers keeps of every pool
ROWS_FOR_PREFIXES = 4  # requests for each row that keeps a prefix, where rows are kept
FEWEST_KEPT = 2  # the end of one prompt must not push out where it parted from others
SHARE_OF_ROWS = 0.25  # of the memory for a cache that rows may take: more would leave their requests no pages


class PoolSize(NamedTuple):
    """A pool as it was made.

    Attributes:
        tokens: that it holds. bytes: of its pages and rows. blocks: pages of `block_tokens` tokens in every layer.
        requests: that may hold blocks at once.
    """

    tokens: int
    bytes: int
    blocks: int
    block_tokens: int
    requests: int


def size_of(figures: dict[str, Any]) -> PoolSize:
    """The size of a pool with these `PagedCache.figures`."""
    blocks, tokens = figures["blocks"], figures["page_tokens"]
    return PoolSize(blocks * tokens, figures["bytes"], blocks, tokens, figures["requests"])


class RowCount(NamedTuple):
    """The rows of a pool.

    Attributes:
        requests: that may hold blocks at once. kept: rows behind theirs, for prefixes. bytes: of all of them in all
            layers. blocks: of a request, at most; None is all of the pool.
    """

    requests: int
    kept: int
    bytes: int
    blocks: int | None


def rows_of(layouts: Sequence[Layout], config: Any, positions: int | None, requests: int, memory: float) -> RowCount:
    """The rows of a pool for so many requests, or for fewer where they would take more than a quarter of the memory.

    Args:
        layouts: of all layers. config: a resolved `ContinuousBatchingConfig`. positions: of the model; None is no end.
        memory: bytes for pages and rows.
    """
    blocks = None if positions is None else -(-positions // layouts[0].spec.window.block)
    longest = blocks or (config.num_blocks or 0) + SPARE_BLOCKS
    row = sum(row_bytes(layout, longest) for layout in layouts)
    keeps = all(map(keeps_rows, layouts)) and not all(map(shares_pages, layouts)) and config.allow_block_sharing
    fit = int(SHARE_OF_ROWS * memory / row)
    fit = fit * ROWS_FOR_PREFIXES // (ROWS_FOR_PREFIXES + 1) if keeps else fit
    requests = max(1, min(requests, fit, config.num_blocks or fit))
    kept = max(FEWEST_KEPT, requests // ROWS_FOR_PREFIXES) if keeps else 0
    return RowCount(requests, kept, (requests + kept) * row, blocks)


def bound_on_host(layouts: Sequence[Layout], config: Any, positions: int | None) -> None:
    """Set the size of a pool off a GPU that nobody sized: `HOST_BYTES` and `HOST_TOKENS` at most.

    Args:
        layouts: of all layers. config: a resolved `ContinuousBatchingConfig`, which is changed. positions: of the
            model; None is no end.
    """
    config.num_blocks = HOST_TOKENS // layouts[0].spec.window.block
    rows = rows_of(layouts, config, positions, config.max_requests_per_batch, HOST_BYTES)
    fit = (HOST_BYTES - rows.bytes) // (mean_page_bytes(layouts) * len(layouts)) - SPARE_BLOCKS
    config.num_blocks = max(1, min(fit, config.num_blocks))
    config.max_requests_per_batch = min(rows.requests, config.num_blocks)
