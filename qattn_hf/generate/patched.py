"""State of a patched model: recipe, specs and memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from qattn_hf.attention import attention, model_attention, stock_cache
from qattn_hf.cache.cache import QAttnCache
from qattn_hf.cache.last_cache import LastCache
from qattn_hf.cache.notices import Notices
from qattn_hf.cache.pool import Pool
from qattn_hf.model.heads import HeadSizes
from qattn_hf.model.layer_kinds import ModelLayerSpec, WindowLayerSpec
from qattn_hf.recipes.recipe import Recipe, check_packs
from qattn_hf.saved.weights import Weights
from qattn_kernels.layer.arena import zeroed_together
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import State


class Runner(NamedTuple):
    """How decode steps run.

    Attributes:
        how: `eager`, `graph`, `fused`, `compile`, or `stock` over Transformers' own caches.
        why: the reason if no CUDA graph captures the steps. None if one does, or if the recipe asks for eager steps.
    """

    how: str
    why: str | None = None

    @property
    def captures(self) -> bool:
        """Whether CUDA graphs capture the steps."""
        return self.how in ("graph", "fused", "compile") and self.why is None


@dataclass
class Patched:
    """State that `patch` attaches to a model and its decoder as `_qattn`: recipe, layer specs, how to undo the patch.

    Attributes:
        specs: a `LayerSpec` for each packed layer, a `ModelLayerSpec` for each unpacked one.
        unpacked_attention: attention implementation of the unpacked layers; None if all layers are packed.
        device_type: `cuda` or `cpu`, for which `impl` of each layer was chosen.
        attn_implementations: each config of the model with its attention implementation before `patch`.
        packed_implementations: the same after `patch`.
        unpacked_call: why the last call attended as before `patch`, whose attention the configs name then. None if it
            packed (`patching/training.py`).
        runner: how `generate` runs its decode steps (`step_runner.runner_of_model`).
        window: width in tokens of the narrowest sliding window, None without one; no window hides a position
        sizes: heads of each layer, if all layers are packed and on one device; else None.
        hook_ids: ids of the forward hooks on both modules.
        marked: number of modules that carry this state: 2, the model and its decoder, or 1 if they are the same.
        constants: for each layer, the state tensors that no call writes (`model_constants.constants`).
        weights: the weights for which a pass of the model gave these tensors; None without such a pass.
        holders: names of the modules that store an offset of positions (`offsets.py`).
        last, pool: the last cache, and memory kept for the next one.
        notices: warnings that this patch has given.
    """

    recipe: Recipe
    specs: list[LayerSpec | ModelLayerSpec]
    unpacked_attention: str | None
    device_type: str
    attn_implementations: list[tuple[PretrainedConfig, str | None]]
    runner: Runner
    packed_implementations: list[tuple[PretrainedConfig, str | None]] = field(default_factory=list)
    unpacked_call: str | None = None
    window: int | None = None
    sizes: list[HeadSizes] | None = None
    hook_ids: list[int] = field(default_factory=list)
    marked: int = 0
    constants: list[State] = field(default_factory=list)
    weights: Weights | None = None
    holders: tuple[str, ...] = ()
    last: LastCache = field(default_factory=LastCache)
    pool: Pool = field(default_factory=Pool)
    notices: Notices = field(default_factory=Notices)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle and register the attention: this process may not have patched any model yet."""
        self.__dict__.update(state)
        self.register()

    def register(self) -> str:
        """Register this patch's attention and mask functions with Transformers. Return their name."""
        if not self.recipe.settings.packs():
            return stock_cache.register(self.packed[0])
        windows = any(isinstance(spec, WindowLayerSpec) for spec in self.specs)
        if self.unpacked_attention is None:
            return attention.register(windows)
        return model_attention.register(self.unpacked_attention, windows)

    @property
    def packs_now(self) -> bool:
        """Whether the configs name the packed attention."""
        return self.unpacked_call is None

    def attention_before(self, config: PretrainedConfig) -> str | None:
        """Return the attention implementation that a decoder with this config had before the patch."""
        text = config.get_text_config(decoder=True)
        return next((name for one, name in self.attn_implementations if one is text), None)

    @property
    def packed(self) -> list[LayerSpec]:
        """Specs of the packed layers."""
        return [spec for spec in self.specs if isinstance(spec, LayerSpec)]

    def new_cache(self, max_cache_len: int | None = None) -> QAttnCache:
        """Return a new, empty cache for this patch's recipe, and record it as the model's last one.

        Args:
            max_cache_len: fixed capacity in tokens per row; None lets the cache grow.

        Raises:
            UnsupportedError: the recipe packs nothing (`cache="model"`).
        """
        check_packs(self.recipe)
        cache = QAttnCache(self.specs, self.recipe, max_cache_len, self.device_type, self.pool)
        cache.with_constants(self.constants)
        self.last.record(cache)
        return cache

    def allocate(self, cache: QAttnCache, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate an empty cache for `rows` rows before a call, if head sizes are known (`QAttnCache.allocate`)."""
        if self.sizes is not None and not torch.is_autocast_enabled(device.type):
            shapes = [((rows, size.kv, 0, size.dim), (rows, size.kv, 0, size.v_dim)) for size in self.sizes]
            made = {shape: torch.empty(shape, dtype=dtype, device=device) for pair in shapes for shape in pair}
            with zeroed_together():
                cache.allocate([(made[k], made[v]) for k, v in shapes])

    def release(self) -> None:
        """Free the memory kept for later calls: the last cache, idle arenas and captured decode steps."""
        self.last.clear()
        self.pool.clear()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def patch_of(module: torch.nn.Module) -> Patched:
    """Return the state that `patch` attached to this module."""
    patched: Any = module._qattn
    return patched
