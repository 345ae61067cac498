"""Count the memory that a call of a model needs for activations, without a GPU.

The model's forward runs on the meta device, where tensors have shapes and no memory. Its attention allocates what the
kernels' launchers allocate, and launches nothing. So the count follows any model's code without formulas.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from qattn_hf.attention.attention import scores_of
from qattn_hf.layer.handle import Handle, Written
from qattn_hf.layer.kv_sharing import with_earlier
from qattn_hf.model._compat import CACHE
from qattn_hf.model.layer_kinds import local_window, window_of
from qattn_hf.planning.live_memory import LiveMemory
from qattn_kernels.launch.plan import ALIGNMENT, Result, recorded
from qattn_kernels.layer.arena import Layout, places, rewritten_bytes, views
from qattn_kernels.layer.scores import Scores
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layer.state import layer_tensors
from qattn_kernels.layer.step import Arena, Step
from qattn_kernels.layout import Geometry
from qattn_kernels.step.states import drop_front, left_behind, most_left_behind

NAME = "qattn_activations"
META = torch.device("meta")


class Planned(NamedTuple):
    """Allocations of a launch plan (`qattn_kernels.launch.plan`), with all temporary tensors as one.

    Attributes:
        results: what the call returns.
        temporary: bytes of all temporary tensors.
    """

    results: list[Result]
    temporary: int

    @classmethod
    def of(cls, results: Sequence[torch.Tensor], allocated: list[torch.Tensor]) -> Planned:
        """Make the plan of a call that returned `results` and allocated the tensors in `allocated`."""
        returned = {x.untyped_storage()._cdata for x in results}
        others = [x.nbytes for x in allocated if x.untyped_storage()._cdata not in returned]
        temporary = sum(-(-n_bytes // ALIGNMENT) * ALIGNMENT for n_bytes in others)
        return cls([Result(x.shape, x.stride(), x.dtype) for x in results], temporary)

    def allocate(self) -> list[torch.Tensor]:
        """Allocate temporary memory and return the result tensors, as `Plan.run` does."""
        results = [torch.empty_strided(x.size, x.stride, dtype=x.dtype, device=META) for x in self.results]
        torch.empty(self.temporary, dtype=torch.uint8, device=META)
        return results


class CountedLayer(CacheLayerMixin):
    """Cache layer of a counted forward: it counts tokens and stores nothing.

    Args:
        geometry: sizes of the layer, with the capacity.
        spec: spec of a packed layer. None is a layer of Transformers' `DynamicCache`.
        plans: plans of packed layers' calls, shared by all layers of a cache. The key has all that a plan depends on.
        shared: whether other layers read this layer's keys and values (`layer/kv_sharing.py`). The readers have no
            spec.

    Attributes:
        past: tokens that each row holds.
        stock: keys and values of a `DynamicCache`, which grows by copying.
    """

    is_sliding = False

    def __init__(
        self, geometry: Geometry, spec: LayerSpec | None, plans: dict[Hashable, Planned | None], shared: bool = False
    ):
        super().__init__()
        self.geometry, self.spec, self.past, self.plans, self.shared = geometry, spec, 0, plans, shared
        self.stock: dict[str, torch.Tensor] = {}
        if spec is not None:
            self.layout = Layout(geometry, spec)
            self.arena = torch.empty(places(self.layout)[1], dtype=torch.uint8, device=META)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the handle of a call, as key and as value. A `DynamicCache` copies each side in turn as it grows."""
        if self.spec is None:
            for side, new in (("keys", key_states), ("values", value_states)):
                shape = (*new.shape[:2], self.past + new.shape[2], new.shape[3])
                self.stock[side] = torch.empty(shape, dtype=new.dtype, device=META)
        handle = Handle(self, key_states, value_states)
        return handle, handle

    def attend(self, query: torch.Tensor, handle: Handle, scaling: float | None, kwargs: dict[str, Any]) -> Any:
        """Return the output `[B, Hq, T, Dv]`, and allocate what the call needs.

        The first call of a shape allocates as the launchers do. Later calls allocate as their launch plan does."""
        batch, heads, tokens, _ = query.shape
        if self.spec is None:  # flash attention: the output and fp32 log-sum-exp
            out = query.new_empty((batch, tokens, heads, self.geometry.v_dim)).transpose(1, 2)
            query.new_empty((batch, heads, tokens), dtype=torch.float32)
            return out
        window = window_of(self.spec)
        scores = scores_of(query, scaling, kwargs)._replace(window=local_window(self.spec))
        if handle.written is not None:
            arena, capacity, past, *_ = handle.written
            layout = Layout(replace(self.geometry, blocks=capacity), self.spec)
            query = with_earlier(query, handle.key.shape[2])
            return self._computed(query, handle, scores, arena, layout, past)[:, :, -tokens:]
        if window is not None:
            return self._attend_window(query, handle, scores, window)
        blocks = self._blocks_for(self.past)
        self._keep(handle, self.arena, self.layout, blocks)
        return self._computed(query, handle, scores, self.arena, self.layout, blocks)

    def _keep(self, handle: Handle, arena: torch.Tensor, layout: Layout, blocks: int) -> None:
        """Keep what layers that read the same keys and values need, while the handle lives."""
        if self.shared:
            before = torch.empty(rewritten_bytes(layout), dtype=torch.uint8, device=META)
            handle.written = Written(arena, layout.geometry.blocks, blocks, before)

    def _attend_window(self, query: torch.Tensor, handle: Handle, scores: Scores, window: int) -> torch.Tensor:
        """Attend in a packed window, in the steps of `WindowLayer`.

        A full layer moves its blocks to the front. If a call still has no room, it runs over a larger copy."""
        assert self.spec is not None
        tokens, block = query.shape[2], self.spec.window.block
        capacity, used = self.geometry.blocks * block, min(self.past, self.geometry.blocks * block)
        behind = partial(most_left_behind, self.spec.window, window)
        if used + tokens > capacity:
            used = min(used, self.past - behind(self.past) * block)
            if self.past:
                kept = torch.empty_like(self.arena)
                self._drop_front(self.arena, self.layout, window)
                del kept
        if used + tokens <= capacity:
            self._keep(handle, self.arena, self.layout, self._blocks_for(used))
            return self._computed(query, handle, scores, self.arena, self.layout, self._blocks_for(used))
        blocks = self._blocks_for(used + tokens)
        if not self.past:  # for a first prompt the host knows which blocks leave the window, and copies the others
            blocks = max(blocks, behind(tokens) + self.geometry.blocks)
        layout = Layout(replace(self.geometry, blocks=blocks), self.spec)
        arena = torch.empty(places(layout)[1], dtype=torch.uint8, device=META)
        if self.shared:
            self._keep(handle, torch.empty_like(arena), layout, self._blocks_for(used))
        out = self._computed(query, handle, scores, arena, layout, self._blocks_for(used))
        if self.past:
            self._drop_front(arena, layout, window)
        return out

    def _drop_front(self, arena: torch.Tensor, layout: Layout, window: int) -> None:
        state = views(arena, layout)
        drop_front(state, layer_tensors(*layout), left_behind(state, layout.spec.window, window))

    def _blocks_for(self, tokens: int) -> int:
        assert self.spec is not None
        return -(-tokens // self.spec.window.block)

    def _computed(
        self, query: torch.Tensor, handle: Handle, scores: Scores, arena: torch.Tensor, layout: Layout, blocks: int
    ) -> torch.Tensor:
        """Return the operator's output over this arena. It reads `blocks` blocks."""
        from qattn_kernels.step.operator import compute

        key = layout, query.shape, blocks, scores._replace(sinks=None), scores.sinks is None
        if (plan := self.plans.get(key)) is not None:
            return plan.allocate()[0]
        span = torch.empty((query.shape[0], 2), dtype=torch.int32, device=META)
        step = Step(query, handle.key, handle.value, span, Arena(arena, layout, layout.encode()), scores, blocks)
        results, recorder = recorded(partial(compute, step), collects=True)
        self.plans[key] = None if recorder.foreign else Planned.of(results, recorder.allocated)
        return results[0]

    def get_seq_length(self) -> int:
        return self.past

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.past + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of a counted forward, over `CountedLayer`s."""
    return key.layer.attend(query, key, scaling, kwargs).transpose(1, 2).contiguous(), None


def register() -> str:
    """Register attention and mask function with Transformers as `NAME`, and return that name."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    return NAME


def run(model: PreTrainedModel, layers: list[CountedLayer], tokens: int, past: int, live: LiveMemory) -> None:
    """Count a call of `generate`. If all layers are packed, the first two layers of each kind run for all.

    Args:
        model: on the meta device, with the attention `NAME` selected (`selection.attending`).
        layers: layers of its cache.
        tokens: new tokens of each row.
        past: tokens that the cache holds before the call.
        live: counts what the call allocates and frees.
    """
    rows = layers[0].geometry.batch
    known = inspect.signature(model.forward).parameters
    for layer in layers:
        layer.past = past
    with torch.no_grad(), _few_layers(model, [layer.spec for layer in layers]), live:
        ids = torch.empty((rows, tokens), dtype=torch.int64, device=META)
        extra: dict[str, Any] = {"position_ids": torch.empty_like(ids), "logits_to_keep": 1}
        extra = {name: value for name, value in extra.items() if name in known}
        logits = model(ids, use_cache=True, **{CACHE: Cache(layers=layers)}, **extra).logits
        logits[:, -1].to(copy=True, dtype=torch.float32).argmax(-1)  # as `generate` does


@contextmanager
def _few_layers(model: PreTrainedModel, specs: list[LayerSpec | None]) -> Iterator[None]:
    """Keep only the first two layers of each kind in the decoder within a `with` block, if all layers are packed.

    Further layers of a kind would allocate the same as these two."""
    stacks = [
        module
        for module in model.get_decoder().modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == len(specs)
    ]
    if len(stacks) != 1 or None in specs:  # keys and values of a `DynamicCache` grow layer by layer, and stay allocated
        yield
        return
    layers, seen = stacks[0]._modules, Counter[Any]()
    kept = []
    for layer, spec in zip(layers.values(), specs, strict=True):
        kind = (spec, *((name, p.shape) for name, p in layer.named_parameters()))
        seen[kind] += 1
        if seen[kind] <= 2:
            kept.append(layer)
    stacks[0]._modules = {str(i): layer for i, layer in enumerate(kept)}
    try:
        yield
    finally:
        stacks[0]._modules = layers
