"""The packed cache: a transformers `Cache` whose layers are `QAttnLayer`s."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from qattn_hf import changes
from qattn_hf.cuda_graph.pool import Pool
from qattn_hf.device import device_of
from qattn_hf.errors import QAttnError, UnsupportedError
from qattn_hf.layer import QAttnLayer, capturing
from qattn_hf.recipe import Recipe, check_packs, find_recipe
from qattn_hf.tensor_parallel import share_of
from qattn_kernels.layer.spec import LayerSpec


class QAttnCache(Cache):
    """Packed keys and values of a model; pass it as `past_key_values`, or let a patched model make it.

    Args:
        specs: what each layer stores and how it computes (`Recipe.layer_specs`).
        recipe: where they come from, for the report.
        max_cache_len: fixed capacity in tokens a row, rounded up to whole blocks; None grows as needed.
        device_type: the device type that the recipe's `impl` was resolved for.
        pool: of the patched model, which lends the tensors if the capacity is known before the first write.
    """

    layers: list[QAttnLayer]

    def __init__(
        self,
        specs: list[LayerSpec],
        recipe: Recipe,
        max_cache_len: int | None = None,
        device_type: str | None = None,
        pool: Pool | None = None,
    ):
        if max_cache_len is not None and (type(max_cache_len) is not int or max_cache_len < 1):
            raise QAttnError(f"max_cache_len = {max_cache_len!r}: a positive number of tokens, or None")
        super().__init__(layers=[QAttnLayer(spec, max_cache_len, device_type) for spec in specs])
        self.recipe, self.pool = recipe, pool
        self.ran("eager")  # as a plain forward does

    def ran(self, decode: str, reason: str | None = None) -> None:
        """Note for the report which path the decode steps of the last `generate` took, and why no other one."""
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
        """A cache for `model`, by the recipe it was patched with or by another one.

        Args:
            model: the model that will use the cache.
            method, recipe, settings: as in `patch`; none of them takes the patched model's own recipe.
            max_cache_len: fixed capacity in tokens a row, rounded up to whole blocks; a call beyond it raises
                `CapacityError` and writes nothing. None lets the cache grow.

        Raises:
            RecipeError: if there is no such recipe, or it does not fit the model.
            UnsupportedError: if the recipe packs nothing.
        """
        patched = getattr(model, "_qattn", None)
        if patched is not None and method is None and recipe is None and not settings:
            return patched.new_cache(max_cache_len)
        chosen = find_recipe(method, recipe, settings, beside=model.config.name_or_path).for_model(model.config)
        check_packs(chosen)
        device_type = device_of(model).type
        specs = chosen.layer_specs(model.config, device_type, share_of(model))
        return cls(specs, chosen, max_cache_len, device_type)

    @property
    def device(self) -> torch.device:
        """Where the tensors of a cache are that was written to."""
        return self.layers[0].device

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Record the call in its layer, see `QAttnLayer.update`; the first one finds the memory for it."""
        if self.pool is not None and not self.layers[layer_idx].is_initialized and not torch.compiler.is_compiling():
            if self.layers[0].planned and not any(layer.is_initialized for layer in self.layers):
                self.layers = self.pool.take(self.layers, key_states, value_states)
                # a list of its own: `self.layers` may be held by others when this cache is gone
                weakref.finalize(self, self.pool.put, [*self.layers]).atexit = False
            if not self.layers[layer_idx].is_initialized:
                self.pool.allocate(self.layers[layer_idx].lazy_initialization, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def count(self, tokens: int) -> None:
        """Note on the host a step that runs without the Python code of the layers; `reserve` made room for it."""
        for layer in self.layers:
            layer.count(tokens)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more columns in every layer before any of them writes; see `QAttnLayer.reserve`. Not
        while a CUDA graph is captured: what has no room then is counted on the device (`overflow`)."""
        if not capturing():
            for layer in self.layers:
                layer.reserve(tokens)

    def plan(self, tokens: int) -> None:
        """Make room for `tokens` columns in all, layer by layer, and keep that capacity."""
        for layer in self.layers:
            layer.plan(tokens)

    def raise_horizon(self, tokens: int) -> None:
        """Let `crop` take back `tokens` tokens bit for bit from here on."""
        self._take([changes.with_horizon(layer, tokens) for layer in self.layers])

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the rows that `indices` names, in that order: a tensor of numbers, a mask, a list, a tuple or a slice.

        Raises:
            QAttnError: if it names rows that the cache does not have. Whatever is raised, nothing was changed.
        """
        self._take([changes.selected(layer, indices) for layer in self.layers])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after another. Whatever is raised, nothing was changed."""
        self._take([changes.repeated(layer, repeats) for layer in self.layers])

    def _take(self, made: list[changes.Change | None]) -> None:
        for layer, change in zip(self.layers, made, strict=True):
            layer.take(change)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes the old row `beam_idx[i]`, in place, in every layer.

        Raises:
            QAttnError: if that is not one row for each; nothing was changed.
        """
        largest = max(map(changes.largest_bytes, self.layers))
        room = torch.empty(largest, dtype=torch.uint8, device=self.device) if largest else None
        for layer in self.layers:
            changes.reorder(layer, beam_idx, room)

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Remove tokens from the end of every row, see `QAttnLayer.crop`. Where an interrupted call left layers with
        different lengths, a positive number that all of them reach mends that."""
        super().crop(tokens_to_remove)
        if not any(layer.torn for layer in self.layers) and len(set(self._lengths())) == 1:
            for layer in self.layers:
                layer.edits = self.layers[0].edits

    def _lengths(self) -> list[int]:
        return [int(layer.get_seq_length()) for layer in self.layers]

    def check_whole(self, layers: int | None = None) -> None:
        """Refuse a cache that an exception left half changed: the first layers have a call that others do not have.

        Args:
            layers: how many of them the model uses; all by default.

        Raises:
            UnsupportedError: with the way out.
        """
        used = self.layers[:layers]
        torn = any([layer.torn for layer in used])
        if not torn and len({layer.edits for layer in used}) == 1:
            return
        found = sorted(set(self._lengths()))
        mend = f"cache.crop({found[0]}) takes back what only some have; " if not torn and found[0] < found[-1] else ""
        raise UnsupportedError(
            f"an earlier call with this cache was interrupted, and its layers hold {' or '.join(map(str, found))} "
            f"columns: {mend}cache.reset() empties it, or take a fresh cache"
        )

    def marks(self) -> list[tuple[int | None, int, bool]]:
        """What layers note on the host, for `recall`."""
        return [(layer._used, layer.edits, layer.replayed_by_others) for layer in self.layers]

    def recall(self, marks: list[tuple[int | None, int, bool]]) -> None:
        """Take back what was noted since `marks`, of calls that changed nothing on the device."""
        for layer, (used, edits, by_others) in zip(self.layers, marks, strict=True):
            layer._used, layer.edits, layer.replayed_by_others, layer.torn = used, edits, by_others, False

    def state_tensors(self) -> dict[str, Any]:
        """Every tensor of every layer: `{"0.k.codes4": (tensor, batch_dim), ...}`."""
        return {f"{i}.{name}": t for i, layer in enumerate(self.layers) for name, t in layer.state_tensors().items()}


class LastCache:
    """The last cache of a model, for its report; copies and pickles of the model forget it.

    It is held until the next one is made or the model is unpatched, and let go before the next one allocates. Each
    thread has its own, so that threads which share a model see what they did; one that made none sees the newest.
    """

    def __init__(self) -> None:
        self._of_threads: weakref.WeakKeyDictionary[threading.Thread, QAttnCache] = weakref.WeakKeyDictionary()
        self._newest: QAttnCache | None = None
        self._passed: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def __deepcopy__(self, memo: Any) -> LastCache:
        return LastCache()

    def __reduce__(self) -> Any:
        return LastCache, ()

    @property
    def cache(self) -> QAttnCache | None:
        """That of the thread which asks, or the newest."""
        own = self._of_threads.get(threading.current_thread())
        return self._newest if own is None else own

    def record(self, cache: QAttnCache) -> None:
        """The thread's last cache from here on, unless `pass_over` was for it."""
        thread = threading.current_thread()
        if thread in self._passed:
            self._passed.discard(thread)
            return
        self._of_threads[thread] = self._newest = cache

    def pass_over(self, whether: bool) -> None:
        """Whether the next cache that this thread makes is a second one beside that of `generate`."""
        thread = threading.current_thread()
        (self._passed.add if whether else self._passed.discard)(thread)

    def clear(self) -> None:
        """Let go of the caches of all threads."""
        self._of_threads.clear()
        self._newest = None
