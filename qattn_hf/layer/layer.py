"""One packed layer of the cache: device tensors, reorder, crop, growth and copies, for all methods."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from qattn_hf.errors import CapacityError, UnsupportedError
from qattn_hf.layer import changes, rollback
from qattn_hf.layer.arena_holder import ArenaHolder
from qattn_hf.layer.handle import Handle, Written
from qattn_hf.layer.kv_sharing import attend_again
from qattn_hf.model.device import capturing, compiling
from qattn_hf.model.layer_kinds import window_of
from qattn_kernels.formats.traits import least_heads
from qattn_kernels.layer.arena import Layout, Outline, columns_seen, outline
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import SHORT_CALL, LayerSpec
from qattn_kernels.layer.state import layer_tensors
from qattn_kernels.layer.step import Step
from qattn_kernels.layer.support import unsupported
from qattn_kernels.layout import Geometry, State, TensorSpec
from qattn_kernels.step.operator import attend, attend_and_keep, attend_step
from qattn_kernels.step.prompt import attend_prompt, by_sdpa, sees_raw
from qattn_kernels.step.states import crop

_geometry = lru_cache(maxsize=1024)(Geometry)  # each layer of a new cache looks up its geometry twice


@lru_cache(maxsize=1024)
def _checked(geometry: Geometry, spec: LayerSpec) -> Outline:
    """Return the outline of a new layer.

    Raises:
        UnsupportedError: the recipe does not fit the shape.
    """
    low = max(least_heads(spec.k), least_heads(spec.v))
    if low > geometry.heads:
        raise UnsupportedError(
            f"the recipe gives {low} heads of a layer 2 bits, but the layer has {geometry.heads} KV heads: "
            "use bits=4 or bits=2"
        )
    reason = unsupported(spec, geometry.heads, geometry.k_dim, geometry.v_dim) if spec.impl == "triton" else None
    if reason is not None:
        raise UnsupportedError(f"Triton kernels cannot compute this layer: {reason}. impl='reference' can, far slower")
    return outline(Layout(geometry, spec))


class QAttnLayer(ArenaHolder, CacheLayerMixin):
    """Packed keys and values of one attention layer.

    `update` only records: it returns one `Handle` for key and value. The attention function writes, packs and attends
    through `attend`. All state is in device tensors at fixed addresses, `state_tensors()`.

    Args:
        spec: formats, window, compute, sparsity and implementation of this layer.
        max_cache_len: largest number of tokens per row; a call beyond it raises `CapacityError`. None: the layer grows.
        device_type: `cuda` or `cpu`, for which `spec.impl` was chosen; others are refused. None: any.
    """

    is_croppable, is_sliding = True, False

    def __init__(self, spec: LayerSpec, max_cache_len: int | None = None, device_type: str | None = None):
        super().__init__()
        self.spec, self.max_cache_len, self.device_type = spec, max_cache_len, device_type
        self.planned = max_cache_len is not None  # the capacity is known to suffice and stays fixed
        self.blocks = self._blocks_for(max_cache_len or 1)
        self._state: State | None = None
        self.edits, self.torn = 0, False  # number of changes; whether one began and did not end
        # Upper bound of the slots that any row uses, kept on the host so that steps need not wait for the device. None:
        # compiled steps may have run, so the bound must be read from the device, as with `replayed_by_others`.
        self._used: int | None = 0
        self._too_high = False  # True after a crop that did not lower the bound
        self.replayed_by_others = False  # True after a capture by anyone but `GraphedCall`, which counts its replays
        self.prompt_by = spec.impl  # implementation that computed the last prompt

    # The contract of Transformers' caches

    @property
    def is_compileable(self) -> bool:
        """Whether the capacity is fixed, so that a decode step can be compiled or captured."""
        return self.planned

    @property
    def capacity(self) -> int:
        """Token slots of a row."""
        return self.blocks * self.spec.window.block

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate all tensors for the batch, heads and dims of these keys and values.

        Args:
            key_states, value_states: `[B, Hkv, T, D]`; only shape, dtype and device are used.

        Raises:
            UnsupportedError: another device type than at `patch`, or a shape that the recipe does not fit.
        """
        device = key_states.device
        self._check_device(device)
        known = _checked(self.geometry_of(key_states, value_states), self.spec)
        self.geometry, self.dtype, self.device = known.layout.geometry, key_states.dtype, device
        self._allocate(known, device)
        self.is_initialized = True

    def stored(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tensors stored as K and as V, given the two tensors that a module passes to its cache."""
        return key_states, value_states

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Record keys and values `[B, Hkv, T, D]` of a call. Returns the same `Handle` twice, for key and value."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        handle = Handle(self, key_states, value_states)
        return handle, handle

    def get_seq_length(self) -> torch.Tensor:
        """Return the columns fed so far, padding included: a new 0-d int64 tensor on the layer's device."""
        # a compiled step would get a view as an extra input, and an eager call would make all views for this one
        if self.arena is not None and (self._state is None or compiling()):
            return columns_seen(self.arena).clone()
        return self.state["columns_seen"].clone()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of columns that a mask of Transformers covers, and the first of them."""
        return self.capacity, 0

    def get_max_length(self) -> int:
        return self.capacity if self.planned else -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Empty the layer. The tensors keep their addresses."""
        self.torn = True
        self.clear()
        self._used, self.edits, self.torn, self.prompt_by = 0, 0, False, self.spec.impl

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder rows in place: row i becomes the old row `beam_idx[i]`, int `[B]` (`changes.rows_of`)."""
        if self.is_initialized:
            rows = changes.rows_of(self, beam_idx)
            changes.reorder(
                self, rows, torch.empty(changes.room_to_reorder(self), dtype=torch.uint8, device=self.device)
            )

    @property
    def batch(self) -> int | None:
        """Rows of the layer; None before its first call."""
        return self.geometry.batch if self.is_initialized else None

    def with_rows(self, rows: torch.Tensor) -> changes.Change:
        """Return the change to the rows `rows`, int64 `[B]`, for `take`."""
        return changes.with_rows(self, rows)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the rows that `indices` selects, in that order (`changes.selected`)."""
        self.take(changes.selected(self, indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times in sequence."""
        self.take(changes.repeated(self, repeats))

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Remove columns from the end of every row: -n removes the last n, n > 0 keeps the first n, 0 removes none.

        Raises:
            UnsupportedError: as in `rollback.plan_layer`.
        """
        if count := int(tokens_to_remove):  # a deferred stop check passes 0 at every step: do not wait for the device
            rollback.crop(self, rollback.plan_layer(self, count))

    def remove(self, count: int) -> None:
        """Remove the last `count` columns; none may be padding. A rejected draft does not wait for the device."""
        with self.editing():
            self.cut(count)

    def cut(self, count: int) -> None:
        """Remove the last `count` columns of a layer that owns its arena. The caller counts the edit."""
        assert self.arena is not None
        crop(self.state, self.spec, count, self.arena, self._layout)
        self._too_high = True
        if count > self.spec.window.horizon:
            self._used = self._slots_used()

    def check_crop(self, count: int) -> None:
        """Check that the state without the last `count` tokens can be restored; this class always can."""

    def activate_past_recording(self) -> None:
        """Do nothing: the ring keeps `crop_horizon` tokens. Assisted generation calls this before roll-backs."""

    def offload(self) -> None:
        raise UnsupportedError(
            "a packed cache cannot offload: make it without offloading; between calls cache.save(path) keeps it in a "
            "file, and QAttnCache.load reads the file"
        )

    prefetch = offload

    # Methods of packed layers

    def attend(
        self, query: torch.Tensor, handle: Handle, span: torch.Tensor, scores: Scores, unpadded: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Write the handle's tokens and attend.

        Args:
            query: `[B, Hq, T, D]`. handle: result of this layer's `update`.
            span: int32 `[B or 1, 2]`, first real new column and number of real ones.
            scores: softmax scale, soft cap and learned sinks.
            unpadded: True if every column of `span` is known to be real.

        Returns:
            output `[B, Hq, T, Dv]`, zeros for padding on the left, and fp32 log-sum-exp `[B, Hq, T]`; None for a prompt
            that PyTorch's SDPA computed.
        """
        self._check_call(query, handle)
        if handle.written is not None:
            return attend_again(self, query, handle, span, scores)
        key, value, tokens = handle.key, handle.value, query.shape[2]
        if compiling() or capturing():
            self.own()
            if compiling():
                self._used = None
            else:
                self.replayed_by_others = True
            where = self.arena, self._layout, self.blocks
            return self._fixed_step(handle, query, key, value, span, *where, *scores, self.blocks)
        past, prompt_by = self._blocks_for(self.reserve(tokens)), self.spec.impl
        result: tuple[torch.Tensor, torch.Tensor | None]
        with self.writing(tokens) as before:
            step = Step(query, key, value, span, self, scores, past)
            sdpa = unpadded and past == 0 and by_sdpa(step)
            handle.written = self.written(past, before, sdpa and sees_raw(self.spec))
            if sdpa:
                result, prompt_by = (attend_prompt(step), None), "sdpa"
            else:
                result = attend_step(step)
        self.count(tokens)
        self.prompt_by = prompt_by if tokens > SHORT_CALL else self.prompt_by
        return result

    def state_tensors(self) -> dict[str, tuple[torch.Tensor, int | None]]:
        """Return every tensor of the layer by name, with its batch dimension (None: shared by all rows)."""
        if not self.is_initialized:
            return self.outside_arena()
        packed = {name: (self.state[name], spec.batch_dim) for name, spec in self.tensor_specs().items()}
        return packed | self.outside_arena()

    def outside_arena(self) -> dict[str, tuple[torch.Tensor, int | None]]:
        """Return the tensors of `state_tensors` that are not in the arena; none in this class."""
        return {}

    def reserve(self, tokens: int) -> int:
        """Make room for `tokens` more columns, outside any captured step.

        Returns:
            an upper bound of the slots that any row uses before the new columns.

        Raises:
            CapacityError: the capacity is fixed and too small; nothing was written.
        """
        used, long = self._used, tokens > SHORT_CALL  # a long call unpacks this much of the past
        if used is None or self.replayed_by_others or used + tokens > self.capacity or (long and self._too_high):
            self._used, self._too_high = (used := self._slots_used()), False
        if used + tokens > self.capacity:
            self._extend(used, tokens)
        self.own()
        return used

    def plan(self, tokens: int) -> None:
        """Grow to `tokens` columns in total, the most that the caller will write, and fix the capacity there.

        Raises:
            CapacityError: the capacity is already fixed and too small; nothing was changed.
        """
        used = self._used = self._slots_used()
        slack = used - int(self.state["columns_seen"])  # slots lost to short blocks, less columns without a token
        if self.max_cache_len is None:
            self._grow(max(self.blocks, self._blocks_for(tokens + slack)))
            self.planned = True
        elif tokens + slack > self.capacity:
            raise CapacityError(
                f"the cache holds {self.capacity} tokens a row and generate may need {tokens + slack}; nothing was "
                "changed. Use a larger max_cache_len, fewer max_new_tokens, or a cache that grows"
            )

    def raise_horizon(self, tokens: int) -> None:
        """Enlarge the ring of open tokens, so that `crop` removes up to `tokens` later tokens bit for bit."""
        self.take(changes.with_horizon(self, tokens))

    def count(self, tokens: int) -> None:
        """Count on the host `tokens` columns that were written; `reserve` made room for them."""
        assert self._used is not None
        self._used += tokens
        self.edits, self.torn = self.edits + 1, False

    def take(self, change: changes.Change | None) -> None:
        """Apply a change of the module `changes`; None changes nothing. It applies completely or not at all."""
        if change is None:
            return
        if change.geometry is None or change.arena is None:
            self.spec = change.spec
        else:
            self._adopt(change.arena, outline(Layout(change.geometry, change.spec)))

    def borrow(self, arena: torch.Tensor, geometry: Geometry, spec: LayerSpec, slots: int) -> None:
        """Take an arena that others may read too; a write copies it. Its fullest row uses `slots` slots.

        Raises:
            UnsupportedError: another device type than at `patch`.
        """
        self._check_device(arena.device)
        self.take(changes.Change(arena, geometry, spec))
        self.dtype, self.device, self.is_initialized = geometry.dtype, arena.device, True
        self.borrowed, self._used, self.edits = True, slots, 1

    def geometry_of(self, key_states: torch.Tensor, value_states: torch.Tensor) -> Geometry:
        """Return the geometry for keys and values `[B, Hkv, T, D]`, at the current capacity."""
        batch, heads, _, k_dim = key_states.shape
        return _geometry(batch, heads, k_dim, value_states.shape[-1], self.blocks, key_states.dtype)

    # Internals

    def _fixed_step(self, handle: Handle, *call: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a compiled or captured step as one operator with arguments `call` (`step.operator.attend`)."""
        # in a capture, `reserve` has compacted the window before; a compiled step compacts inside the operator
        window = window_of(self.spec) if compiling() else None
        if not self.shared and window is None:
            return attend(*call)
        out, lse, before = attend_and_keep(*call, window or 0, self._rewritten if self.shared else 0)
        handle.written = Written(call[4], self.blocks, self.blocks, before) if self.shared else None
        return out, lse

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.spec.window.block)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Shape and role of every tensor of the layer, by name."""
        return layer_tensors(self.geometry, self.spec)

    def _slots_used(self) -> int:
        """Return the slots of the fullest row, including those lost in short blocks. Waits for the device.

        Raises:
            CapacityError: compiled steps ran past the capacity.
        """
        if not self.is_initialized:
            return 0
        s = self.state
        used = s["closed"] * self.spec.window.block + s["length"] - s["open_start"]
        slots, overflow = torch.stack([used.max(), s["overflow"].max()]).tolist()
        if overflow:
            raise CapacityError(
                f"steps ran past the {self.capacity} tokens that a row of the cache holds: {overflow} are lost, "
                "and what was generated since is wrong. Start from a fresh cache with a larger max_cache_len"
            )
        return slots

    def _extend(self, used: int, tokens: int) -> None:
        """Make room for `tokens` columns after the `used` slots; the capacity is too small for them."""
        if self.max_cache_len is not None:
            raise CapacityError(
                f"the cache holds {self.capacity} tokens a row, {used} are taken and {tokens} more came; "
                "nothing was written. Use a larger max_cache_len, or none so that the cache grows"
            )
        blocks = self._blocks_for(used + tokens)
        self._grow(changes.with_room(blocks) if self.is_initialized else blocks)
        self.planned = False

    def _grow(self, blocks: int) -> None:
        """Grow the arenas to `blocks` and keep the content. If memory runs out, the layer is unchanged."""
        if self.is_initialized and blocks != self.blocks:
            self.take(changes.with_blocks(self, blocks))
        self.blocks = blocks

    def _check_device(self, device: torch.device) -> None:
        if self.device_type is not None and device.type != self.device_type:
            raise UnsupportedError(
                f"the model was patched for {self.device_type} and runs on {device.type}; patch it again"
            )

    def _check_call(self, query: torch.Tensor, handle: Handle) -> None:
        """Refuse a call whose batch, heads, dims or device differ from the cache's."""
        geo, key, value = self.geometry, handle.key, handle.value
        if query.shape[0] != geo.batch:
            raise UnsupportedError(
                f"the cache holds {geo.batch} rows and the call has {query.shape[0]}; "
                "use a fresh cache, or batch_repeat_interleave / batch_select_indices"
            )
        cached, new = (geo.heads, geo.k_dim, geo.v_dim), (key.shape[1], key.shape[3], value.shape[3])
        if cached != new or key.device != self.device:
            raise UnsupportedError(
                f"the cache holds {cached[0]} KV heads of {cached[1]} and {cached[2]} channels on {self.device}, the "
                f"model has {new[0]} of {new[1]} and {new[2]} on {key.device}: it was made for another model, "
                "or it has moved. Pass QAttnCache.for_model(model), or none"
            )
