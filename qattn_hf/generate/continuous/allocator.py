"""Assign the pool's blocks and rows to requests, and copy rows between forwards."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from qattn_hf.generate.continuous.batch import Held, row_of
from qattn_hf.generate.continuous.model_pages import ModelPages
from qattn_hf.generate.continuous.page_layout import by_block, bytes_of, resized
from qattn_hf.generate.continuous.pages import PagedLayer
from qattn_hf.generate.continuous.prefixes import Prefixes
from qattn_hf.generate.continuous.rings import RingLayer, ring_of
from qattn_hf.generate.continuous.transformers_api import FullAttentionCacheAllocator
from qattn_kernels.layout import State

log = logging.getLogger(__name__)


class PackedAllocator(FullAttentionCacheAllocator):
    """Allocate blocks of packed pages and one row per request. A block is one page in each layer without a window.

    Args:
        pages: what the layers keep.
        constants: for each layer, the state tensors that no call writes, by name.
        slots: largest number of requests that hold blocks at once.
        kept: rows after the requests' rows, for kept prefixes.
        blocks: largest number of blocks of a request; None means all blocks.
        kwargs: arguments that Transformers passes to its own allocators.
    """

    supports_block_table = False

    def __init__(
        self,
        pages: ModelPages,
        constants: Sequence[State],
        slots: int,
        kept: int,
        blocks: int | None,
        device: torch.device,
        **kwargs: Any,
    ):
        self.pages, self.constants, self.slots, self.device = pages, constants, slots, device
        self.blocks_of_row = blocks
        self.prefixes = Prefixes(range(slots, slots + kept), kwargs["page_size"])
        self.supports_block_sharing = pages.shares_pages
        self._before_cache_tensor_init(
            index=kwargs["index"],
            layer_indices=kwargs["layer_indices"],
            tokens_per_page=kwargs["page_size"],
            bytes_per_page=pages.block_bytes // len(kwargs["layer_indices"]),
            allow_block_sharing=kwargs["allow_block_sharing"],
        )
        self.slot_of: dict[str, int] = {}  # row of each request
        self.new: set[str] = set()  # requests whose row is still unwritten
        self.to_copy: list[tuple[int, int]] = []  # rows of forked requests: (source, target)
        self.to_begin: list[tuple[int, int]] = []  # (row of a kept prefix, row of the request that begins with it)
        # (name of the prefix, request that has read it, tokens to remove)
        self.to_keep: list[tuple[str, Held, int]] = []
        self.ended: set[int] = set()  # rows of ended requests; a step over all rows would still read their blocks
        self.returned: set[int] = set()  # blocks returned to the pool, with the masks of their last owner

    def register_cache_tensor(self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Any, pool: Any) -> None:
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        give_back = pool.free_blocks

        def noted(index: int, blocks: list[int]) -> None:
            give_back(index, blocks)
            self.returned.update(blocks)

        pool.free_blocks = noted
        # Transformers leaves two sectors free before the first block. One becomes the reserved page, and the memory of
        # the other pays for the alignment between tensors.
        pages, begin = self.num_blocks + self.blocks_per_sector, 0
        rows = self.slots + len(self.prefixes.rows)
        self.layers: dict[int, PagedLayer] = {}
        self.pooled: list[PagedLayer] = []  # layers whose pages are in the pool
        for index, layout in self.pages.layouts.items():
            given = self.constants[index]
            if ring_of(layout.spec) is not None:
                self.layers[index] = RingLayer(layout, rows, self.device, given)
                continue
            end = begin + bytes_of(by_block(resized(layout, 1, pages)))
            self.layers[index] = PagedLayer(layout, cache_tensor[begin:end], pages, rows, given, self.blocks_of_row)
            self.pooled.append(self.layers[index])
            begin = end
        for source in self.pages.reads.values():
            self.layers[source].read_again = True

    def pages_of(self, request_id: str) -> list[int]:
        """Return the pages of a request in order."""
        return [block - self.blocks_per_sector for block in self.block_table[request_id]]

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        super().allocate_cache_to_request(request_id, past_length, query_length)
        if request_id not in self.slot_of:
            self.slot_of[request_id] = self.free_slots()[0]
            self.new.add(request_id)

    def free_slots(self) -> list[int]:
        """Return the rows that no request holds."""
        return sorted(set(range(self.slots)) - set(self.slot_of.values()))

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        super().free_blocks(request_id, no_cache)
        if request_id in self.slot_of:
            slot = self.slot_of.pop(request_id)
            self.ended.add(slot)
            self.to_begin = [pair for pair in self.to_begin if pair[1] != slot]
        self.new.discard(request_id)

    def free_all_requests(self) -> None:
        super().free_all_requests()
        self.ended.update(self.slot_of.values())
        self.slot_of.clear()
        self.new.clear()
        self.to_copy.clear()
        self.to_begin.clear()
        self.to_keep.clear()
        self.prefixes.clear()

    def begin_with(self, request_id: str, name: str) -> None:
        """Start a request from a kept prefix: it gets a copy of the prefix's row and shares the prefix's pages."""
        self.slot_of[request_id] = slot = self.free_slots()[0]
        self.to_begin.append((self.prefixes.kept[name], slot))
        self.block_table[request_id] = list(self.block_table[name])
        for block in self.block_table[name]:
            self.ledger.acquire(block)

    def keep(self, name: str, request_id: str, past: int, drop: int) -> None:
        """Keep the stored tokens of a request without the last `drop` as a prefix.

        The pages are shared at once. `keep_rows` copies the row later.
        """
        row, leaves = self.prefixes.room({source for source, _ in self.to_begin})
        if name in self.prefixes.kept or row is None:
            return
        if leaves is not None:
            self.forget(leaves)
        self.block_table[name] = self.block_table[request_id][: (past - drop) // self.tokens_per_page]
        for block in self.block_table[name]:
            self.ledger.acquire(block)
        self.prefixes.kept[name] = row
        held = Held(self.slot_of[request_id], past, 0, self.pages_of(request_id), False)
        self.to_keep.append((name, held, drop))

    def forget(self, name: str) -> None:
        """Stop keeping a prefix. Requests that began with it keep its pages."""
        del self.prefixes.kept[name]
        self.to_keep = [one for one in self.to_keep if one[0] != name]
        self.free_blocks(name)

    def keep_rows(self) -> None:
        """Copy the rows of new prefixes, before the next forward writes to the source rows."""
        while self.to_keep:
            name, held, drop = self.to_keep.pop()
            try:
                for layer in self.layers.values():
                    layer.keep_row(row_of(held, layer.layout.spec.window, self.device), self.prefixes.kept[name], drop)
            except (RuntimeError, MemoryError) as error:  # no request depends on a kept prefix
                log.warning("a prefix is not kept for requests that begin alike: %s", error)
                self.forget(name)

    def fork_blocks(self, source_request_id: str, dest_request_id: str, past_length: int) -> Any:
        slot = self.slot_of[dest_request_id] = self.free_slots()[0]
        self.to_copy.append((self.slot_of[source_request_id], slot))
        return super().fork_blocks(source_request_id, dest_request_id, past_length)

    def unfinished_forks(self) -> list[str]:
        """Return and forget the forked requests whose rows are not copied yet."""
        slots = {slot for _, slot in self.to_copy}
        self.to_copy.clear()
        return [request_id for request_id, slot in self.slot_of.items() if slot in slots]

    def clear_pages(self) -> None:
        """Clear the masks of returned blocks on the forward's stream, before the forward writes to the blocks.

        A step only sets the mask bits of non-finite tokens, so stale bits would stay.
        """
        if self.returned:
            pages = torch.tensor(sorted(self.returned), device=self.device) - self.blocks_per_sector
            for layer in self.pooled:
                layer.clear_pages(pages)
            self.returned.clear()

    def clear_rows(self) -> None:
        """Prepare rows on the forward's stream: clear returned blocks, empty the rows of ended requests, and fill the
        rows of requests that begin with a prefix."""
        self.clear_pages()
        if self.ended:
            slots = torch.tensor(sorted(self.ended), device=self.device)
            for layer in self.layers.values():
                layer.clear_rows(slots)
            self.ended.clear()
        for source, target in self.to_begin:
            for layer in self.layers.values():
                layer.copy_row(source, target)
        self.to_begin.clear()

    def copy_rows(self) -> None:
        """Copy the rows of forked requests on the forward's stream."""
        self.keep_rows()
        self.clear_rows()
        for source, target in self.to_copy:
            for layer in self.layers.values():
                layer.copy_row(source, target)
        self.to_copy.clear()

    def copy_blocks(self, source_block_ids: list[int], dest_block_ids: list[int]) -> None:
        self.clear_pages()
        ids = torch.tensor([source_block_ids, dest_block_ids], device=self.device) - self.blocks_per_sector
        for layer in self.pooled:
            layer.copy_pages(*ids)
