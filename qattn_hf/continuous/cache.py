"""transformers' paged cache with packed pages: its scheduler hands out blocks, and attention reads and writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch

from qattn_hf.continuous.batch import Held, batches
from qattn_hf.continuous.pages import (
    ALIGNMENT,
    PagedLayer,
    Steps,
    by_block,
    bytes_of,
    page_bytes,
    resized,
    row_bytes,
    shares_pages,
)
from qattn_hf.continuous.transformers_api import (
    FULL_ATTENTION,
    FullAttentionCacheAllocator,
    PagedAttentionCache,
    PagedAttentionMemoryHandler,
    with_names,
)
from qattn_hf.messages import size
from qattn_kernels.layer.arena import Layout
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layout import State

SHARE_OF_ROWS = 0.25  # of the memory for a cache that rows may take: more would leave their requests no pages


class PackedAllocator(FullAttentionCacheAllocator):
    """Blocks of packed pages, one page a layer, and a row for each request.

    Args:
        layouts: of all layers. constants: of each, the state tensors that no call writes, by name.
        slots: requests that may hold blocks at once. kwargs: as transformers gives them to its own allocators.
    """

    supports_block_table = False

    def __init__(
        self, layouts: Sequence[Layout], constants: Sequence[State], slots: int, device: torch.device, **kwargs: Any
    ):
        self.layouts, self.constants, self.slots, self.device = layouts, constants, slots, device
        self.supports_block_sharing = all(map(shares_pages, layouts))
        self._before_cache_tensor_init(
            index=kwargs["index"],
            layer_indices=kwargs["layer_indices"],
            tokens_per_page=kwargs["page_size"],
            bytes_per_page=mean_page_bytes(layouts),
            allow_block_sharing=kwargs["allow_block_sharing"],
        )
        self.held: dict[str, int] = {}  # row of each request
        self.new: set[str] = set()  # requests whose row nothing has been written to
        self.to_copy: list[tuple[int, int]] = []  # rows of forked requests
        self.ended: set[int] = set()  # rows of requests that are gone: steps of others would still read their blocks

    def register_cache_tensor(self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Any, pool: Any) -> None:
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        # Blocks are numbered behind two sectors that transformers leaves free. Of those one is a page of nobody's here,
        # and the memory of the other pays for the boundaries between tensors.
        pages, begin = self.num_blocks + self.blocks_per_sector, 0
        self.layers = {}
        for index, layout, given in zip(self.layer_indices, self.layouts, self.constants, strict=True):
            end = begin + bytes_of(by_block(resized(layout, 1, pages)))
            self.layers[index] = PagedLayer(layout, cache_tensor[begin:end], pages, self.slots, given)
            begin = end

    def pages_of(self, request_id: str) -> list[int]:
        """Pages of a request, in order."""
        return [block - self.blocks_per_sector for block in self.block_table[request_id]]

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        super().allocate_cache_to_request(request_id, past_length, query_length)
        if request_id not in self.held:
            self.held[request_id] = self.free_slots()[0]
            self.new.add(request_id)

    def free_slots(self) -> list[int]:
        """Rows that no request holds."""
        return sorted(set(range(self.slots)) - set(self.held.values()))

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        super().free_blocks(request_id, no_cache)
        if request_id in self.held:
            self.ended.add(self.held.pop(request_id))
        self.new.discard(request_id)

    def free_all_requests(self) -> None:
        super().free_all_requests()
        self.ended.update(self.held.values())
        self.held.clear()
        self.new.clear()
        self.to_copy.clear()

    def fork_blocks(self, source_request_id: str, dest_request_id: str, past_length: int) -> Any:
        slot = self.held[dest_request_id] = self.free_slots()[0]
        self.to_copy.append((self.held[source_request_id], slot))
        return super().fork_blocks(source_request_id, dest_request_id, past_length)

    def unfinished_forks(self) -> list[str]:
        """Requests that were forked and whose rows were not copied; nothing copies them any more."""
        slots = {slot for _, slot in self.to_copy}
        self.to_copy.clear()
        return [request_id for request_id, slot in self.held.items() if slot in slots]

    def clear_rows(self) -> None:
        """Empty the rows of requests that ended, on the stream of the forward."""
        if self.ended:
            slots = torch.tensor(sorted(self.ended), device=self.device)
            for layer in self.layers.values():
                layer.clear_rows(slots)
            self.ended.clear()

    def copy_rows(self) -> None:
        """Copy the rows of requests that were forked, on the stream of the forward."""
        self.clear_rows()
        for source, target in self.to_copy:
            for layer in self.layers.values():
                layer.copy_row(source, target)
        self.to_copy.clear()

    def copy_blocks(self, source_block_ids: list[int], dest_block_ids: list[int]) -> None:
        ids = torch.tensor([source_block_ids, dest_block_ids], device=self.device) - self.blocks_per_sector
        for layer in self.layers.values():
            layer.copy_pages(*ids)


class PackedMemory(PagedAttentionMemoryHandler):
    """How many pages fit: no masks are built, and attention needs one layer's share of a batch beside the cache."""

    def __init__(self, rows: int, layers: int, **kwargs: Any):
        self.rows, self.layers = rows, layers
        super().__init__(**kwargs)
        self.num_attention_masks = 0

    def get_available_memory(self) -> int:
        return int(super().get_available_memory()) - self.rows

    @property
    def bytes_per_cache_token(self) -> int:
        indices: int = self.io_multiplier * self.num_groups * 8
        return indices + math.ceil(2 * self.bytes_per_sector / self.tokens_per_sector / self.layers)


class PagedCache(PagedAttentionCache):
    """transformers' `PagedAttentionCache` with packed pages.

    Args:
        layouts: of all layers. constants: of each, the state tensors that no call writes, by name.
        slots: requests that may hold blocks at once, at most; fewer where their rows would take more than a quarter of
            the memory.
        kwargs: of `PagedAttentionCache`.
    """

    def __init__(self, layouts: Sequence[Layout], constants: Sequence[State], slots: int, **kwargs: Any):
        row, self.layouts = sum(map(row_bytes, layouts)), layouts
        config = kwargs["continuous_batching_config"]
        fit = int(SHARE_OF_ROWS * available(config) / row)
        self.slots = slots = max(1, min(slots, fit, config.num_blocks or fit))
        allocator = partial(PackedAllocator, layouts, constants, slots, torch.device(kwargs["device"]))
        handler = partial(PackedMemory, slots * row, len(layouts))
        with_names(
            PagedAttentionCache.__init__,
            ATTN_TYPE_TO_ALLOCATOR={FULL_ATTENTION: allocator},
            FullAttentionCacheAllocator=SimpleNamespace(get_bytes_per_page=lambda *args: mean_page_bytes(layouts)),
            PagedAttentionMemoryHandler=handler,
            group_layers_by_attn_type=lambda config: {FULL_ATTENTION: list(range(len(layouts)))},
        )(self, **kwargs)
        self.requests: list[Held] = []
        self.figures = self._figures()

    def _figures(self) -> dict[str, Any]:
        """What the pool is made of and has held, for the report: bytes counted from its tensors."""
        allocator = self.allocator
        rows = sum(x.nbytes for layer in allocator.layers.values() for x in layer.rows.values())
        return {
            "page_tokens": allocator.tokens_per_page,
            "blocks": allocator.num_blocks,
            "bytes_per_block": allocator.bytes_per_block,
            "requests": self.slots,
            "bytes_per_request": rows // self.slots,
            "bytes": self.cache_tensor.nbytes + rows,
            "shares_prefixes": bool(self.use_prefix_sharing),
            "most_requests": 0,
            "most_blocks": 0,
        }

    @property
    def allocator(self) -> PackedAllocator:
        """The one allocator of all layers."""
        found: PackedAllocator = self.cache_allocators[FULL_ATTENTION]
        return found

    def held_now(self) -> dict[str, int]:
        """Blocks and bytes in use; may be called while the loop runs."""
        allocator = self.allocator
        free = self.pool.num_free_sectors * allocator.blocks_per_sector + self.pool.count_free_blocks(allocator.index)
        cached = len(allocator.ledger.cached_blocks)
        used = max(0, allocator.num_blocks - free - cached)
        packed = used * allocator.bytes_per_block + len(allocator.held) * int(self.figures["bytes_per_request"])
        return {"blocks_used": used, "blocks_cached": cached, "bytes_packed": packed}

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        allocator = self.allocator
        if state.request_id not in allocator.held and not allocator.free_slots():
            return False
        return bool(super().can_store_request_tokens(state, request_len, dry_run))

    def prepare_fork_request(self, src_state: Any, dst_req_ids: list[str], copy_src_and_dst: Any) -> list[str]:
        fits = dst_req_ids[: len(self.allocator.free_slots())]
        forked: list[str] = super().prepare_fork_request(src_state, fits, copy_src_and_dst)
        return forked

    def perform_cache_copy(self, copy_src_and_dst: Any) -> None:
        super().perform_cache_copy(copy_src_and_dst)
        self.allocator.copy_rows()

    def extend_read_and_write_indices(self, *args: Any) -> None:
        """Nothing: pages are read and written by block, not by token."""

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]) -> Any:
        """Keys and values as they are, and the cache among the attention's arguments, which writes them; models of
        transformers before 5.24 never call it, and put the cache there themselves."""
        kwargs["cache"] = self
        return key, value

    def begin(self, requests: Sequence[Any]) -> None:
        """Note what the next forward serves, before its inputs are prepared.

        Args:
            requests: transformers' `FutureRequestState`s, in the order of the forward's columns.
        """
        allocator = self.allocator
        self.requests = [
            Held(
                allocator.held[one.state.request_id],
                one.state.position_offset,
                one.query_length,
                allocator.pages_of(one.state.request_id),
                one.state.request_id in allocator.new,
            )
            for one in requests
        ]
        allocator.new.difference_update(one.state.request_id for one in requests if one.query_length)
        held = len({page for pages in allocator.block_table.values() for page in pages})
        for key, now in (("most_requests", len(allocator.held)), ("most_blocks", held)):
            self.figures[key] = max(self.figures[key], now)
        self.__dict__.pop("batch", None)

    @cached_property
    def batch(self) -> list[Steps]:
        """The requests of this forward in calls of layers; made in the forward, on its stream."""
        self.allocator.clear_rows()
        in_place = all(layer.in_place for layer in self.allocator.layers.values())
        return batches(self.requests, [layout.spec for layout in self.layouts], self.device, self.slots, in_place)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """Write the forward's keys and values into a layer's pages, and attend request by request.

        Args:
            query: `[1, Hq, N, D]`. key, value: `[1, Hkv, N, D]`; the N columns are the requests' tokens in order.

        Returns:
            `[1, N, Hq, Dv]`.
        """
        columns = query.shape[2]
        out = query.new_zeros(1, columns + 1, query.shape[1], value.shape[-1])  # the last is of rows without a token
        paged = self.allocator.layers[layer]
        for rows in self.batch:
            q, k, v = (x[0].transpose(0, 1)[rows.columns].transpose(1, 2) for x in (query, key, value))
            out[0, rows.targets] = paged.attend(rows, q, k, v, scores).transpose(1, 2)
        return out[:, :columns]


def in_words(figures: dict[str, Any]) -> str:
    """What a report says of a pool with these `PagedCache.figures`."""
    held = "continuous batching: {blocks} blocks of {page_tokens} tokens and {requests} requests in {total}, "
    return (held + "of which {most_blocks} and {most_requests} were held at once").format(
        total=size(figures["bytes"]), **figures
    )


def mean_page_bytes(layouts: Sequence[Layout]) -> int:
    """Bytes of a page, for layers of different sizes their mean, rounded up to `ALIGNMENT`; at least what the
    boundaries between a layer's tensors take."""
    mean = math.ceil(sum(map(page_bytes, layouts)) / len(layouts))
    boundaries = max(len(by_block(layout)) for layout in layouts) * ALIGNMENT
    return max(-(-mean // ALIGNMENT) * ALIGNMENT, boundaries)


def available(config: Any) -> float:
    """Bytes that transformers would take for a cache: free memory times `max_memory_percent`."""
    names = {"self": None, "cb_config": config}
    measured: float = PagedAttentionMemoryHandler.get_available_memory(SimpleNamespace(**names))
    return measured
