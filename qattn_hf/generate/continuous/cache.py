"""Transformers' paged cache with packed pages: the scheduler assigns blocks, and attention reads and writes them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch

from qattn_hf.cache.notices import quantizes, reads_no_code
from qattn_hf.errors import UnsupportedError
from qattn_hf.generate.continuous.admission import positions_of
from qattn_hf.generate.continuous.allocator import PackedAllocator
from qattn_hf.generate.continuous.batch import Held, batches
from qattn_hf.generate.continuous.model_pages import ModelPages
from qattn_hf.generate.continuous.pages import Steps
from qattn_hf.generate.continuous.pool import HOST_TOKENS, rows_of
from qattn_hf.generate.continuous.prefixes import KEPT
from qattn_hf.generate.continuous.rings import Ring, ring_of
from qattn_hf.generate.continuous.transformers_api import (
    FULL_ATTENTION,
    PagedAttentionCache,
    PagedAttentionMemoryHandler,
)
from qattn_hf.layer.handle import Handle
from qattn_hf.model.heads import head_sizes
from qattn_hf.model.with_names import with_names
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layout import State, Window


class PackedMemory(PagedAttentionMemoryHandler):
    """Work out how many pages fit in memory. Attention builds no masks, and needs scratch memory for one layer of a
    batch."""

    def __init__(self, sizes: SimpleNamespace, rows: int, layers: int, **kwargs: Any):
        self.rows, self.layers = rows, layers
        super().__init__(**{**kwargs, "config": sizes})
        self.num_attention_masks = 0

    def get_available_memory(self) -> int:
        return int(super().get_available_memory()) - self.rows

    @property
    def bytes_per_cache_token(self) -> int:
        indices: int = self.io_multiplier * self.num_groups * 8
        return indices + math.ceil(2 * self.bytes_per_sector / self.tokens_per_sector / self.layers)


class PagedCache(PagedAttentionCache):
    """Transformers' `PagedAttentionCache` with packed pages.

    Args:
        pages: what the layers keep.
        constants: for each layer, the state tensors that no call writes, by name.
        slots: largest number of requests that hold blocks at once. The number is lower where the rows would take more
            than their share of the memory.
        kwargs: arguments of `PagedAttentionCache`.
    """

    def __init__(self, pages: ModelPages, constants: Sequence[State], slots: int, **kwargs: Any):
        config, positions = kwargs["continuous_batching_config"], positions_of(kwargs["config"])
        rows = rows_of(pages, config, positions, slots, available(config))
        page = Fraction(pages.block_bytes, kwargs["config"].num_hidden_layers)  # Transformers counts all layers
        sizes = largest_sizes(kwargs["config"], pages.layouts)
        self.pages, self.slots = pages, rows.requests
        if not pages.pooled and config.num_blocks is None:  # blocks then only count tokens
            config.num_blocks = rows.requests * (rows.blocks or HOST_TOKENS // pages.block)
        device = torch.device(kwargs["device"])
        allocator = partial(PackedAllocator, pages, constants, rows.requests, rows.kept, rows.blocks, device)
        handler = partial(PackedMemory, sizes, rows.bytes, max(1, len(pages.pooled)))
        with_names(
            PagedAttentionCache.__init__,
            ATTN_TYPE_TO_ALLOCATOR={FULL_ATTENTION: allocator},
            FullAttentionCacheAllocator=SimpleNamespace(get_bytes_per_page=lambda *args: page),
            find_head_dim=lambda config: sizes.head_dim,
            find_num_key_value_heads=lambda config: sizes.num_key_value_heads,
            PagedAttentionMemoryHandler=handler,
            group_layers_by_attn_type=lambda config: {FULL_ATTENTION: list(range(max(1, len(pages.pooled))))},
        )(self, **kwargs)
        self.requests: list[Held] = []
        self.unseen = set(pages.layouts)  # layers that no forward has reached
        self.by_window: defaultdict[Ring | Window, list[int]] = defaultdict(list)
        for index, layout in pages.layouts.items():
            self.by_window[ring_of(layout.spec) or layout.spec.window].append(index)
        self.use_prefix_sharing: bool = bool(rows.kept) or self.allocator.use_block_sharing
        # tokens of a request's prompt that another request shares and that will be kept
        self.parts: dict[str, int] = {}
        # names of the prefixes of each request's prompt: a waiting prompt is looked up in every step
        self.names: dict[str, list[str]] = {}
        windows = [layout.spec.window for layout in pages.every]
        self.horizon = min(window.horizon for window in windows)
        # tokens of a request from which on a block of some layer is closed
        self.closes = min(window.span + window.residual for window in windows)
        self.figures = self._figures()

    def _figures(self) -> dict[str, Any]:
        """Return the pool's sizes and peak use for the report. Bytes are counted from its tensors."""
        allocator = self.allocator
        rows = sum(layer.bytes_of_rows for layer in allocator.layers.values())
        quantized = [layout.spec for layout in self.pages.every if quantizes(layout.spec)]
        return {
            "page_tokens": allocator.tokens_per_page,
            "blocks": allocator.num_blocks,
            "bytes_per_block": allocator.bytes_per_block,
            "requests": self.slots,
            "bytes_per_request": rows // (self.slots + len(allocator.prefixes.rows)),
            "bytes": self.cache_tensor.nbytes + rows,
            "shares_prefixes": bool(self.use_prefix_sharing),
            "most_requests": 0,
            "most_blocks": 0,
            "unread": all(map(reads_no_code, quantized)) if quantized else None,
            "clamped_scales": None,
        }

    def count_clamped(self) -> None:
        """Count the clamped scales of all pages for the report, after the last forward."""
        layers = self.allocator.layers.values()
        self.figures["clamped_scales"] = sum(layer.clamped_scales() for layer in layers)

    @property
    def allocator(self) -> PackedAllocator:
        """The single allocator of all layers."""
        found: PackedAllocator = self.cache_allocators[FULL_ATTENTION]
        return found

    def held_now(self) -> dict[str, int]:
        """Return the blocks and bytes in use. Safe to call while the loop runs."""
        allocator = self.allocator
        free = self.pool.num_free_sectors * allocator.blocks_per_sector + self.pool.count_free_blocks(allocator.index)
        cached = len(allocator.ledger.cached_blocks) + self._blocks_of(True) - self._blocks_of(False)
        used = max(0, allocator.num_blocks - free - cached)
        packed = used * allocator.bytes_per_block + len(allocator.slot_of) * int(self.figures["bytes_per_request"])
        return {"blocks_used": used, "blocks_cached": cached, "bytes_packed": packed}

    def _blocks_of(self, prefixes: bool) -> int:
        """Count the blocks that requests hold, with or without the blocks of kept prefixes."""
        table = list(self.allocator.block_table.items())
        return len({page for name, pages in table if prefixes or not name.startswith(KEPT) for page in pages})

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        allocator = self.allocator
        if not allocator.free_slots():  # a request without a row cannot begin
            return 0
        if not allocator.prefixes.rows:
            return int(super().search_prefix_match(request_id, prompt_ids))
        if request_id not in self.names:
            self.names[request_id] = allocator.prefixes.names(prompt_ids[:-1])  # one token is left to read
        found = allocator.prefixes.match(self.names[request_id])
        if found.seen > found.tokens:
            self.parts[request_id] = found.seen
        if found.name is None:
            return 0
        allocator.begin_with(request_id, found.name)
        return found.tokens

    def until_part(self, state: Any) -> int | None:
        """Return how many tokens a request must read until its prompt diverges from an earlier one.

        The prefix up to that token is to be kept. None if there is nothing to keep.
        """
        part = self.parts.get(state.request_id, 0) - state.position_offset
        return part if part > 0 else None

    def mark_complete_blocks(self, state: Any, complete_blocks: dict[str, int]) -> None:
        allocator = self.allocator
        if not allocator.prefixes.rows:
            super().mark_complete_blocks(state, complete_blocks)
            return
        past, block = state.position_offset, allocator.tokens_per_page
        done = not state.remaining_prefill_tokens
        if state.generated_len() > 1 or not (done or past == self.parts.get(state.request_id)):
            return
        name, drop = allocator.prefixes.remember(state.initial_tokens[:past]), past % block
        if name is not None and drop <= self.horizon:
            allocator.keep(name, state.request_id, past, drop)

    def evict_cached_blocks(self) -> bool:
        kept = list(self.allocator.prefixes.kept)
        for name in kept:
            self.allocator.forget(name)
        return bool(super().evict_cached_blocks()) or bool(kept)

    def reset(self) -> None:
        self.free_all_requests()
        self.evict_cached_blocks()  # Transformers would only forget the blocks and leave their masks set
        super().reset()

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        super().free_blocks(request_id, no_cache)
        self.parts.pop(request_id, None)
        self.names.pop(request_id, None)

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        allocator = self.allocator
        if state.request_id not in allocator.slot_of and not allocator.free_slots():
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
        """Do nothing: pages are read and written by block, not by token."""

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Return a `Handle` twice, for the attention function, which writes keys and values.

        Transformers before 5.24 skips this method and passes the cache itself to the attention function.
        """
        if layer_idx in self.unseen:
            self._check_heads(layer_idx, key, value)
        handle = Handle(None, key, value)
        handle.cache = self
        return handle, handle

    def _check_heads(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Check the first keys `[1, Hkv, N, D]` and values `[1, Hkv, N, Dv]` of a layer against its pages."""
        sizes = self.pages.layouts[layer_idx].geometry
        if (key.shape[1], key.shape[3], value.shape[3]) != (sizes.heads, sizes.k_dim, sizes.v_dim):
            raise UnsupportedError(
                f"layer {layer_idx} has {key.shape[1]} KV heads of {key.shape[3]} and {value.shape[3]} channels, and "
                f"the model's config says {sizes.heads} of {sizes.k_dim} and {sizes.v_dim}: use generate"
            )
        self.unseen.remove(layer_idx)

    def get_seq_length(self, layer_idx: int | None = None) -> torch.Tensor:
        """Return what a layer adds to the columns of the forward to get the positions of their tokens.

        Layers of Llama 4 scale their queries by position.

        Returns:
            int64 `[N]`, for the N columns of the forward.

        Raises:
            UnsupportedError: a model asks for one length of all rows, without `layer_idx`.
        """
        if layer_idx is not None:
            return self.offsets
        raise UnsupportedError(
            "this model asks its cache for one length of all rows, and requests of a batch have different lengths: use "
            "generate"
        )

    def begin(self, requests: Sequence[Any]) -> None:
        """Record the requests of the next forward, before its inputs are prepared.

        Args:
            requests: Transformers' `FutureRequestState`s, in the order of the forward's columns.
        """
        allocator = self.allocator
        self.requests = [
            Held(
                allocator.slot_of[one.state.request_id],
                one.state.position_offset,
                one.query_length,
                allocator.pages_of(one.state.request_id),
                one.state.request_id in allocator.new,
            )
            for one in requests
        ]
        allocator.new.difference_update(one.state.request_id for one in requests if one.query_length)
        if self.figures["unread"] and any(one.tokens and one.past >= self.closes for one in self.requests):
            self.figures["unread"] = False
        for key, now in (("most_requests", len(allocator.slot_of)), ("most_blocks", self._blocks_of(False))):
            self.figures[key] = max(self.figures[key], now)
        for made in ("batch", "offsets"):
            self.__dict__.pop(made, None)

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Position of the token in each column of this forward, minus the column; int64 `[N]`."""
        positions = [one.past + index for one in self.requests for index in range(one.tokens)]
        return torch.tensor(positions, device=self.device) - torch.arange(len(positions), device=self.device)

    @cached_property
    def batch(self) -> dict[int, list[Steps]]:
        """Group the requests of this forward into calls, for each layer by its index. Runs inside the forward, on its
        stream."""
        self.allocator.clear_rows()
        found: dict[int, list[Steps]] = {}
        for key, indices in self.by_window.items():
            ring, window = (key, key.window) if isinstance(key, Ring) else (None, key)
            requests = self.requests if ring is None else [ring.held(one) for one in self.requests]
            in_place = all(self.allocator.layers[index].in_place for index in indices)
            calls = batches(requests, window, self.device, self.slots, in_place)
            found |= dict.fromkeys(indices, calls)
        return found

    def attend(self, layer: int, query: torch.Tensor, key: Any, value: Any, scores: Scores) -> torch.Tensor:
        """Write the forward's keys and values into a layer's pages and attend, call by call.

        Args:
            query: `[1, Hq, N, D]`; the N columns are the requests' tokens in order.
            key: `[1, Hkv, N, D]`, or the `Handle` of both from `update`.
            value: `[1, Hkv, N, Dv]`, or the same `Handle`.

        Returns:
            `[1, N, Hq, Dv]`.
        """
        if isinstance(key, Handle):
            key, value = key.key, key.value
        columns = query.shape[2]
        # the last column is for rows without a token
        out = query.new_zeros(1, columns + 1, query.shape[1], value.shape[-1])
        source = self.pages.reads.get(layer, layer)
        paged = self.allocator.layers[source]
        for rows in self.batch[source]:
            q, k, v = (x[0].transpose(0, 1)[rows.columns].transpose(1, 2) for x in (query, key, value))
            out[0, rows.targets] = paged.attend(rows, q, k, v, scores, again=source != layer).transpose(1, 2)
        return out[:, :columns]


def largest_sizes(config: Any, layers: Iterable[int]) -> SimpleNamespace:
    """Return the sizes from which Transformers works out the memory of a forward, as a config.

    A config whose layers have different heads has no such values. These are the largest of the layers.
    """
    found = [head_sizes(config, layer) for layer in layers]
    return SimpleNamespace(
        num_attention_heads=max(size.query for size in found),
        num_key_value_heads=max(size.kv for size in found),
        head_dim=max(size.dim for size in found),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        _attn_implementation=config._attn_implementation,
    )


def available(config: Any) -> float:
    """Return the bytes that Transformers would use for a cache: free memory times `max_memory_percent`."""
    names = {"self": None, "cb_config": config}
    measured: float = PagedAttentionMemoryHandler.get_available_memory(SimpleNamespace(**names))
    return measured
