"""How large a pool of packed pages is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from qattn_hf.continuous.cache import SHARE_OF_ROWS
from qattn_hf.continuous.pages import mean_page_bytes, row_bytes
from qattn_kernels.layer.arena import Layout

# Off a GPU the pool lies in the memory of all other programs, and a CPU answers few requests at once.
HOST_BYTES = 2**30
HOST_TOKENS = 32768
SPARE_BLOCKS = 2  # that transformers keeps of every pool


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


def bound_on_host(layouts: Sequence[Layout], config: Any) -> None:
    """Set the size of a pool off a GPU that nobody sized: `HOST_BYTES` and `HOST_TOKENS` at most.

    Args:
        layouts: of all layers. config: a resolved `ContinuousBatchingConfig`, which is changed.
    """
    row = sum(map(row_bytes, layouts))
    slots = max(1, min(config.max_requests_per_batch, int(SHARE_OF_ROWS * HOST_BYTES / row)))
    page = mean_page_bytes(layouts) * len(layouts)
    fit = (HOST_BYTES - slots * row) // page - SPARE_BLOCKS
    config.num_blocks = max(1, min(fit, HOST_TOKENS // layouts[0].spec.window.block))
    config.max_requests_per_batch = min(slots, config.num_blocks)
