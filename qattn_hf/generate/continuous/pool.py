"""Choose the size of a pool of packed pages."""

from __future__ import annotations

from typing import Any, NamedTuple

from qattn_hf.generate.continuous.model_pages import ModelPages

# On a CPU the pool shares its memory with all other programs, and few requests run at once.
HOST_BYTES = 2**30
HOST_TOKENS = 32768
SPARE_BLOCKS = 2  # blocks that Transformers reserves in every pool
ROWS_FOR_PREFIXES = 4  # requests per row for a kept prefix, where rows are kept
FEWEST_KEPT = 2  # with one row, the end of a prompt would evict the point where it diverged from others


class PoolSize(NamedTuple):
    """Size of an allocated pool.

    Attributes:
        tokens: capacity in tokens.
        bytes: bytes of its pages and rows.
        blocks: number of blocks of `block_tokens` tokens; each is a page in every layer.
        requests: largest number of requests that hold blocks at once.
    """

    tokens: int
    bytes: int
    blocks: int
    block_tokens: int
    requests: int


def size_of(figures: dict[str, Any]) -> PoolSize:
    """Return the size of a pool with these `PagedCache.figures`."""
    blocks, tokens = figures["blocks"], figures["page_tokens"]
    return PoolSize(blocks * tokens, figures["bytes"], blocks, tokens, figures["requests"])


class RowCount(NamedTuple):
    """Rows of a pool.

    Attributes:
        requests: largest number of requests that hold blocks at once.
        kept: rows after the requests' rows, for kept prefixes.
        bytes: bytes of all rows in all layers.
        blocks: largest number of blocks of a request; None means all blocks of the pool.
    """

    requests: int
    kept: int
    bytes: int
    blocks: int | None


def rows_of(pages: ModelPages, config: Any, positions: int | None, requests: int, memory: float) -> RowCount:
    """Choose the rows of a pool for `requests` requests. Choose fewer if the rows would take more than their share of
    the memory.

    Args:
        pages: what the layers keep.
        config: a resolved `ContinuousBatchingConfig`.
        positions: positions of the model; None if unbounded.
        memory: bytes for pages and rows.
    """
    blocks = None if positions is None else -(-positions // pages.block)
    longest = blocks or (config.num_blocks or 0) + SPARE_BLOCKS
    row = pages.request_bytes(longest)
    keeps = pages.keeps_rows and not pages.shares_pages and config.allow_block_sharing
    fit = int(pages.share_of_rows * memory / row)
    fit = fit * ROWS_FOR_PREFIXES // (ROWS_FOR_PREFIXES + 1) if keeps else fit
    requests = max(1, min(requests, fit, config.num_blocks or fit))
    kept = max(FEWEST_KEPT, requests // ROWS_FOR_PREFIXES) if keeps else 0
    return RowCount(requests, kept, (requests + kept) * row, blocks)


def bound_on_host(pages: ModelPages, config: Any, positions: int | None) -> None:
    """Bound the size of a pool on a CPU to `HOST_BYTES` and `HOST_TOKENS`, unless the caller set it.

    Args:
        pages: what the layers keep.
        config: a resolved `ContinuousBatchingConfig`; it is changed.
        positions: positions of the model; None if unbounded.
    """
    config.num_blocks = HOST_TOKENS // pages.block
    rows = rows_of(pages, config, positions, config.max_requests_per_batch, HOST_BYTES)
    fit = (HOST_BYTES - rows.bytes) // pages.block_bytes - SPARE_BLOCKS
    config.num_blocks = max(1, min(fit, config.num_blocks))
    config.max_requests_per_batch = min(rows.requests, config.num_blocks)
