"""The packed cache: a Transformers `Cache` of `QAttnLayer`s, and of unpacked layers if the model needs them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from qattn_hf import saved
from qattn_hf.attention.masks import check_earlier_mask
from qattn_hf.cache.conversation import Conversation
from qattn_hf.cache.interrupted import Recoverable, unfinished
from qattn_hf.cache.pool import Pool
from qattn_hf.errors import QAttnError, UnsupportedError
from qattn_hf.layer import changes, kept, rollback
from qattn_hf.layer.budget_layer import BudgetLayer
from qattn_hf.layer.handle import Handle
from qattn_hf.layer.hybrid_layer import any_layer
from qattn_hf.layer.layer import QAttnLayer
from qattn_hf.layer.model_layer import ModelLayer
from qattn_hf.layer.snapshot import LOST, Counts, Snapshot
from qattn_hf.model.device import capturing, compiling, device_of
from qattn_hf.model.layer_kinds import ModelLayerSpec, own_states
from qattn_hf.model.tensor_parallel import shard_of
from qattn_hf.recipes.recipe import Recipe, check_packs, find_recipe
from qattn_hf.saved.writer import Writer
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import State


class QAttnCache(Recoverable, Cache):
    """Packed KV cache of a model, passed as `past_key_values` (named `cache` in Transformers 5.24 and later).

    Make it with `QAttnCache.for_model(model)`. If none is passed, `generate` and calls of a patched model make one.
    Members whose docstring begins with "Internal" may change in any version.

    Args:
        specs: for each layer, the formats and the arithmetic, or the state of an unpacked layer (`Recipe.layer_specs`).
        recipe: the recipe of these specs, for the report.
        max_cache_len: fixed capacity in tokens per row, rounded up to whole blocks. None: the cache grows.
        device_type: `cuda` or `cpu`, for which kernels or reference were chosen. None: any.
        pool: idle memory of the patched model, used if the capacity is known before the first write.
    """

    layers: list[Any]

    def __init__(
        self,
        specs: list[LayerSpec | ModelLayerSpec],
        recipe: Recipe | None = None,
        max_cache_len: int | None = None,
        device_type: str | None = None,
        pool: Pool | None = None,
    ):
        if recipe is None or not isinstance(specs, Sequence):
            raise QAttnError("QAttnCache takes the specs of a recipe's layers. Fix: QAttnCache.for_model(model)")
        if max_cache_len is not None and (type(max_cache_len) is not int or max_cache_len < 1):
            raise QAttnError(f"max_cache_len = {max_cache_len!r}: a positive number of tokens, or None")
        super().__init__(layers=[any_layer(spec, max_cache_len, device_type) for spec in specs])
        self.recipe = recipe
        self.mixed = bool(own_states(specs))
        for spec in specs:
            if isinstance(spec, ModelLayerSpec) and spec.reads is not None:
                self.layers[spec.reads].shared = True
        self.bounded = any(isinstance(layer, BudgetLayer) for layer in self.layers)
        self.pool = None if self.mixed or self.bounded else pool  # layers that change size have no fixed addresses
        self.prefill_chunk_size: int | None = None  # of the last `generate`, for the report
        self.ran("eager")  # a plain forward is eager
        self.captured_call: Any = None  # a `GraphedCall`, if a beam search's steps are captured
        self.replays = False  # True if `generate` runs its steps by a `GraphedCall`
        self.writer = Writer()
        self.conversation = Conversation()
        self.input_ids: torch.Tensor | None = None  # token ids stored in the loaded file, `[B, S]`

    def ran(self, decode: str, reason: str | None = None) -> None:
        """Internal: record for the report how `generate` ran its decode steps, and why (`Report.to_dict`)."""
        self.decode, self.decode_reason = decode, reason

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        method: str | None = None,
        *,
        recipe: str | Path | Recipe | None = None,
        max_cache_len: int | None = None,
        **settings: Any,
    ) -> QAttnCache:
        """Make an empty cache for a model, patched or not yet, with the recipe of its patch or another one.

        Args:
            model: the model that will use the cache.
            method, recipe, settings: as in `patch`. Without any of them, the recipe of a patched model.
            max_cache_len: fixed capacity in tokens per row, rounded up to whole blocks. A call beyond it raises
                `CapacityError` and writes nothing. None lets the cache grow.

        Raises:
            RecipeError: an unknown recipe, or one that does not fit the model.
            UnsupportedError: a recipe that packs nothing (`cache="model"`).
        """
        patched = getattr(model, "_qattn", None)
        if patched is not None and method is None and recipe is None and not settings:
            return patched.new_cache(max_cache_len)
        chosen = find_recipe(method, recipe, settings, checkpoint=model.config.name_or_path).for_model(model.config)
        check_packs(chosen)
        device_type = device_of(model).type
        specs = chosen.layer_specs(model.config, device_type, shard_of(model))
        from qattn_hf.attention.model_constants import constants  # its observer imports caches

        return cls(specs, chosen, max_cache_len, device_type).with_constants(constants(model, specs))

    def save(self, path: str | Path, input_ids: torch.Tensor | None = None) -> None:
        """Write the cache to a safetensors file for `load`, for example a prefix that many questions share.

        Spare capacity is left out. The file appears complete or not at all: it is moved into place after writing.

        Args:
            path: the file; an existing one is replaced.
            input_ids: int `[B, S]`, the tokens that the cache has read, padding included; stored with the cache.

        Raises:
            QAttnError: an empty cache; `input_ids` of another shape or dtype; an unknown model, because it was freed or
                the cache comes from a pickle; a path that cannot be written; a full disk.
            UnsupportedError: a call with this cache was interrupted; the mask of an earlier step was wrong; weights,
                adapters or RoPE frequencies have changed; blocks have fewer bits because memory ran out (`memory`); the
                model is split by tensor parallelism, or its weights are offloaded.
        """
        saved.save(self, path, input_ids)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel, verify: bool = True) -> QAttnCache:
        """Read a cache that `save` wrote, for the same model, patched with the same recipe.

        On a CPU the file stays mapped and is copied at the first write. On a GPU it is copied there once. A
        `copy.deepcopy` of a loaded cache shares the mapped memory until it is written, so one file serves many
        questions. States of unpacked layers are copied at once. Tokens given to `save` become `input_ids` of the cache,
        int64 on the CPU.

        Args:
            path: the file. It must not change while a cache maps it; replacing it by `save` is safe.
            model: the patched model, on the device or devices where it runs.
            verify: compare every tensor with its SHA-256, which reads the whole file once.

        Raises:
            FileNotFoundError: the file does not exist.
            QAttnError: a file that is incomplete, was altered, has another version, or has sizes, lengths or places
                that no call can produce.
            UnsupportedError: the file has another model, weights, adapters, RoPE frequencies, dtype or recipe; or the
                model is not patched, is split by tensor parallelism or offloads weights. Nothing was changed.
        """
        patched = getattr(model, "_qattn", None)
        if patched is None:
            raise UnsupportedError("the model is not patched: patch(model, ...) with the recipe of the file first")
        check_packs(patched.recipe)
        cache = cls(patched.specs, patched.recipe, None, patched.device_type, patched.pool)
        saved.fill(cache.with_constants(patched.constants), path, model, verify)
        return cache

    def with_constants(self, constants: list[State]) -> QAttnCache:
        """Internal: set the state tensors that no call writes (`model_constants`), and return this empty cache."""
        for layer, own in zip(self.layers, constants, strict=True):
            if own:
                layer.constants = own
        return self

    @property
    def packed(self) -> list[QAttnLayer]:
        """The packed layers."""
        return [layer for layer in self.layers if isinstance(layer, QAttnLayer)]

    @property
    def own(self) -> list[ModelLayer]:
        """The unpacked layers."""
        return [layer for layer in self.layers if isinstance(layer, ModelLayer)]

    @property
    def allocated(self) -> bool:
        """Internal: whether the packed layers have their tensors; true after the first call."""
        return next((layer.is_initialized for layer in self.layers if isinstance(layer, QAttnLayer)), True)

    @property
    def device(self) -> torch.device:
        """Device of the cache's tensors, which exist after the first call."""
        layer = next(layer for layer in self.layers if getattr(layer, "device", None) is not None)
        return layer.device

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Record one layer's new keys and values. The model's attention calls this.

        Nothing is written yet: the attention function writes, quantizes and attends. The first call allocates.

        Args:
            key_states, value_states: `[B, Hkv, T, D]`.
            layer_idx: index of the layer.

        Returns:
            the same `Handle` twice, in place of keys and values; for an unpacked layer, keys and values.
        """
        # reading a count that changes with every call would recompile each step
        if not compiling() and self.pool is not None and not self.layers[layer_idx].edits:
            self._allocate(layer_idx, *self.layers[layer_idx].stored(key_states, value_states))
        key, value = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if isinstance(key, Handle):
            key.cache = self
        return key, value

    def allocate(self, like: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Internal: allocate all layers of an empty cache before a call.

        Otherwise the call allocates layer by layer. PyTorch's allocator would place layers between the call's
        activations, and later activations would fit less well.

        Args:
            like: for each layer, tensors `[B, Hkv, 0, D]` with the dtypes and sizes of the call's keys and values.
        """
        if self.pool is not None:
            for i, (keys, values) in enumerate(like):
                self._allocate(i, keys, values)

    def _allocate(self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Give an empty layer its tensors, from the pool if possible, unless it already has fitting ones."""
        assert self.pool is not None
        if self.layers[0].planned and not self.allocated:
            taken = self.pool.take(self.packed, key_states, value_states)
            # a copy of the list: others may hold `self.layers` after this cache is gone
            weakref.finalize(self, self.pool.put, [*taken]).atexit = False
            own, rest = self.layers, iter(taken)
            self.layers = [next(rest) if isinstance(layer, QAttnLayer) else layer for layer in own]
        layer = self.layers[layer_idx]
        if not layer.is_initialized or layer.geometry != layer.geometry_of(key_states, value_states):
            self.pool.allocate(layer.lazy_initialization, key_states, value_states)

    def count(self, tokens: int) -> None:
        """Internal: count on the host `tokens` columns that a replayed CUDA graph writes; `reserve` made room."""
        for layer in self.packed:
            layer.count(tokens)

    def reserve(self, tokens: int) -> None:
        """Internal: make room for `tokens` more columns in every layer, before any layer writes.

        During a CUDA graph capture this does nothing: tokens without room are counted on the device.

        Raises:
            CapacityError: the capacity is fixed and too small; nothing was written.
        """
        if not capturing():
            for layer in self.packed:
                layer.reserve(tokens)

    def plan(self, tokens: int) -> None:
        """Internal: make room for `tokens` columns in total, layer by layer, and fix the capacity there.

        Raises:
            CapacityError: the capacity is already fixed and too small; nothing was changed.
        """
        for layer in self.packed:
            layer.plan(tokens)

    def raise_horizon(self, tokens: int) -> None:
        """Enlarge the ring of open tokens, so that `crop` removes up to `tokens` later tokens bit for bit."""
        self._ready()
        packed = [isinstance(layer, QAttnLayer) for layer in self.layers]
        self._take([changes.with_horizon(x, tokens) if p else None for x, p in zip(self.layers, packed, strict=True)])

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the rows that `indices` (a tensor, list or tuple of numbers, a bool mask, a slice) selects, in order.

        Raises:
            QAttnError: a row that the cache does not have. After any exception the cache is unchanged.
            UnsupportedError: an earlier call or edit was interrupted.
        """
        self._ready()
        self._take([changes.selected(part, indices) for part in (*self.layers, self.conversation)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times in sequence, for example for beams. After an exception nothing is changed."""
        self._ready()
        self._take([changes.repeated(part, repeats) for part in (*self.layers, self.conversation)])

    def _take(self, part_changes: list[Any]) -> None:
        """Apply a change to each layer, and to the conversation if the list has an extra entry."""
        with self._editing([layer.mark(bytes_too=False) for layer in self.layers]):
            for part, change in zip((*self.layers, self.conversation), part_changes, strict=False):
                part.take(change)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder rows for beam search, in place: row i becomes the old row `beam_idx[i]`, in every layer.

        Args:
            beam_idx: int `[B]`.

        Raises:
            QAttnError: wrong shape or an invalid row; nothing was changed.
            UnsupportedError: an earlier call or edit was interrupted, including an interrupt while rows were moved.
        """
        self._ready()
        own: list[Any] = [*self.own, self.conversation]
        for part in own:
            changes.check_beams(part, beam_idx)
        moved = [part.with_rows(beam_idx) for part in own]
        packed = [layer for layer in self.packed if layer.is_initialized]
        rows = [changes.rows_of(layer, beam_idx) for layer in packed]
        largest = max(map(changes.room_to_reorder, packed), default=0)
        room = torch.empty(largest, dtype=torch.uint8, device=self.device)
        with self._editing([LOST] * len(self.layers)):
            for layer, order in zip(packed, rows, strict=True):
                changes.reorder(layer, order, room)
            for part, change in zip(own, moved, strict=True):
                part.take(change)

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Remove tokens from the end of every row.

        A crop of up to `crop_horizon` tokens is exact: the cache equals one that never held them, bit for bit. Farther
        back the remaining tokens keep their quantized values. After an exception the cache is unchanged. A positive
        number that all layers reach also repairs a cache whose layers differ in length after an interrupted call.

        Args:
            tokens_to_remove: -n removes the last n columns, 0 none; n > 0 keeps the first n columns.

        Raises:
            UnsupportedError: a removed column belongs to a call with padding, or an unpacked layer or a sliding window
                cannot be restored; nothing was changed. Also if an earlier call or edit was interrupted and this crop
                does not repair the cache, or if the mask of an earlier step was wrong.
        """
        self._ready()
        if (count := int(tokens_to_remove)) == 0:
            return
        check_earlier_mask(self, wait=True)
        packed, alike = self.packed, len({layer.edits for layer in self.packed}) == 1
        plans = rollback.plan_cache(self.layers, count, int(self.get_seq_length()) if self.mixed else 0)
        left = {plan.left for layer, plan in zip(self.layers, plans, strict=True) if isinstance(layer, QAttnLayer)}
        if not alike and count > 0 and len(left - {0}) > 1:
            raise unfinished(packed)
        marks = [LOST if plan.empties else x.mark(bytes_too=True) for x, plan in zip(self.layers, plans, strict=True)]
        with self._editing(marks):
            for layer, plan in zip(self.layers, plans, strict=True):
                rollback.crop(layer, plan)
            if all(plan.empties for plan in plans):
                self.conversation.clear()
            if not alike and len(left) == 1:
                for layer in packed:
                    layer.edits = packed[0].edits

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer as attention reads them, fp32 `[B, Hkv, columns, D]`; zeros for padding.

        Args:
            layer: index of the layer.

        Raises:
            UnsupportedError: as in `keep`.
        """
        self._ready()
        return kept.read(self.layers[layer])

    def keep(self, mask: torch.Tensor | Sequence[torch.Tensor | None]) -> None:
        """Keep some tokens of a prompt, remove the others and free their blocks. After an exception nothing is changed.

        Later tokens have the positions that they would have without this. Heads may keep different tokens: a row takes
        the memory of the head that keeps most. Kept tokens are quantized again, with their new neighbours. Formats with
        one scale per token find the same codes; others round a second time.

        Args:
            mask: bool `[B, columns]` or `[B, Hkv, columns]`, true for tokens to keep. One mask is for all layers
                without a window. A list has one for each layer; None keeps all tokens. Padding's columns are ignored.

        Raises:
            QAttnError: a mask of another dtype or shape, or one that keeps no token of a row.
            UnsupportedError: a mask for a layer with a window, states of linear attention or a memory limit; an empty
                cache; a call had padding on the right; tokens were removed before.
        """
        self._ready()
        check_earlier_mask(self, wait=True)
        self._take(kept.changes_to(self.layers, mask))

    def reset(self) -> None:
        """Empty every layer. After an interrupt, only another `reset` makes the cache usable."""
        with self._editing([LOST] * len(self.layers)):
            super().reset()
            self.conversation.clear()

    def before_capture(self) -> Snapshot:
        """Internal: host-side counts of the packed layers, before a step that writes nothing or is counted later."""
        return Snapshot([Counts({**x.counts(), "replayed_by_others": x.replayed_by_others}) for x in self.packed])

    def state_tensors(self) -> dict[str, Any]:
        """Return every tensor of every layer by layer and name, with its batch dimension: `{"0.k.codes4": (tensor, 0),
        ...}`.

        The batch dimension is None for tensors that all rows share. Reports count these tensors' bytes.
        """
        return {f"{i}.{name}": t for i, layer in enumerate(self.layers) for name, t in layer.state_tensors().items()}
