"""Predict the memory of a model with each way to cache, and what fits. Users import it by `plan.py`.

Weights and cache are counted exactly, as they are allocated. Activations are counted by running the model's forward on
the meta device (`activations`). All allocations follow PyTorch's rules for taking memory from CUDA
(`caching_allocator`). Constants below cover what PyTorch does not tell in advance.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from qattn_hf.errors import QAttnError, UnsupportedError
from qattn_hf.generate.long_prompts import chunk_of
from qattn_hf.layer.memory_budget import BudgetLayerSpec
from qattn_hf.layer.window_layer import packed_layer
from qattn_hf.model import latent
from qattn_hf.model.heads import head_sizes
from qattn_hf.model.layer_kinds import ModelLayerSpec, model_layers, own_states, window_of
from qattn_hf.model.selection import attending
from qattn_hf.planning import activations
from qattn_hf.planning.caching_allocator import ROUNDING, CachingAllocator
from qattn_hf.planning.check import quantization_of, without_weights
from qattn_hf.planning.live_memory import LiveMemory
from qattn_hf.recipes.recipe import Recipe, check_packs, find_recipe
from qattn_kernels.layer.arena import rewritten_bytes
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import Geometry

__all__ = ["Memory", "Planner", "Way"]

CONTEXT = 640 * 2**20  # bytes of CUDA's context and loaded kernels, which PyTorch's allocator does not see
WORKSPACE = 96 * 2**20  # of cuBLAS, for the streams of `generate` and of captured steps, and of the captured step
TOKEN_BYTES = 5 * 8  # a token's id, mask and position in `generate`, with copies; int64
STEP = 64  # tokens; step of the search for a context
MOST = 2**31  # upper limit of any search


@dataclass(frozen=True)
class Way:
    """How keys and values are cached.

    Attributes:
        name: a method with its settings, or `full`, Transformers' `DynamicCache`.
        origin: the recipe, as a report names it.
        specs: one for each layer, or None for `full`. A layer that reads the keys and values of an earlier layer has
            None.
    """

    name: str
    origin: str
    specs: list[LayerSpec | None] | None


@dataclass(frozen=True)
class Memory:
    """Bytes on the GPU while `generate` runs, at the moment when the total is largest.

    Attributes:
        weights: parameters and buffers.
        cache: all tensors of the cache.
        activations: all other allocations of the model's calls.
        fixed: bytes independent of lengths, and free gaps between tensors.
    """

    weights: int
    cache: int
    activations: int
    fixed: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.weights + self.cache + self.activations + self.fixed


class Planner:
    """Predicts the memory of `generate` for a model of this config on a GPU.

    The whole context counts as prompt. Rows are unpadded and equally long. Weights are on one GPU. Layers are packed,
    and layers with a window follow the recipe's `sliding`.

    Args:
        model: folder or hub name whose config is read, or a config.
        dtype: dtype of weights and activations. None: the config's dtype, else bf16.
        weight_bytes: bytes of the weights. Quantized checkpoints need it.
        prefill_chunk_size: tokens of a row in one call of a packed cache's prompt. None: as `generate` cuts it
            (`long_prompts.chunk_of`). `full` takes a prompt as one call.
        fixed: bytes independent of lengths. Use `WORKSPACE` alone if the limit applies to PyTorch's allocator.

    Raises:
        UnsupportedError: `patch` refuses the model, or it has latent attention.
        QAttnError: the checkpoint is quantized and `weight_bytes` is missing.
        OSError: the config is missing.
    """

    def __init__(
        self,
        model: str | Path | PretrainedConfig,
        *,
        dtype: torch.dtype | None = None,
        weight_bytes: int | None = None,
        prefill_chunk_size: int | None = None,
        fixed: int = CONTEXT + WORKSPACE,
    ):
        config = model if isinstance(model, PretrainedConfig) else AutoConfig.from_pretrained(model)
        self.config = copy.deepcopy(config)
        self.config.dtype = self.dtype = dtype or getattr(config, "dtype", None) or torch.bfloat16
        self.prefill_chunk_size, self.fixed = prefill_chunk_size, fixed
        if weight_bytes is None and (how := quantization_of(self.config)) is not None:
            raise QAttnError(
                f"the weights are quantized ({how}), and the config does not give their size: pass it, "
                "Planner(..., weight_bytes=N), or qattn plan MODEL --weights 16GiB"
            )
        self._model = without_weights(self.config)
        latent.check_stock(self._model)
        own = [*self._model.parameters(), *self._model.buffers()]  # tied ones once
        self._weights = [x.nbytes for x in own] if weight_bytes is None else [weight_bytes]
        self.weight_bytes = sum(-(-n_bytes // ROUNDING) * ROUNDING for n_bytes in self._weights)
        with self._counted():
            pass  # entering checks that the model can be patched

    def way(self, method: str | Recipe) -> Way:
        """Make a way to cache from `full`, a method with settings such as `turbo:bits=2`, or a recipe.

        A recipe may be a `Recipe`, or its name or file.

        Raises:
            RecipeError: an unknown method, recipe or setting, or one that does not fit the model.
            UnsupportedError: no kernel computes the settings, they pack nothing, or some layers stay unpacked, such as
                windows without `sliding=packed`.
        """
        if method == "full":
            self._check_packed(model_layers(self.config), "full attention")
            return Way("full", "transformers' DynamicCache", None)
        recipe = method if isinstance(method, Recipe) else find_recipe(method, None, {})
        recipe = recipe.for_model(self.config)
        specs = recipe.layer_specs(self.config, "cuda")
        self._check_packed(specs, "packed layers")
        if any(isinstance(spec, BudgetLayerSpec) for spec in specs):
            raise UnsupportedError("memory= already sets the size of the cache: plan the fewest bits without it")
        check_packs(recipe)
        packed = [spec if isinstance(spec, LayerSpec) else None for spec in specs]
        if any(spec is not None and spec.impl != "triton" for spec in packed):
            raise UnsupportedError(
                "the reference computes some of its layers, and only the memory of kernels is predicted; qattn doctor "
                "says why"
            )
        return Way(str(method) if isinstance(method, str) else recipe.method, recipe.origin, packed)

    def _check_packed(self, specs: Sequence[LayerSpec | ModelLayerSpec | None], what: str) -> None:
        """Refuse unpacked layers. `what` names the planned layers for the message."""
        own = own_states(specs)
        if own:
            packs = (
                "; sliding='packed' packs windows, where it can" if any(getattr(x, "why", None) for x in own) else ""
            )
            raise UnsupportedError(
                f"{len(own)} layers of {self.config.model_type} stay unpacked, with {own[0]}, and only the "
                f"memory of {what} is planned{packs}; qattn doctor counts the bytes of any cache"
            )

    def memory(self, way: Way, batch: int, context: int) -> Memory:
        """Return the memory of `generate` with `batch` rows that reach `context` tokens each, without a limit."""
        live, allocator, cache = self._followed(way, batch, context)
        return Memory(self.weight_bytes, cache, live.peak - self.weight_bytes - cache,
                      self.fixed + allocator.peak - live.peak)  # fmt: skip

    def fits(self, memory: int, way: Way, batch: int, context: int) -> bool:
        """Return whether `generate` with `batch` rows that reach `context` tokens each runs in `memory` bytes."""
        return not self._followed(way, batch, context, memory - self.fixed)[1].failed

    def longest(self, memory: int, way: Way, batch: int = 1) -> int:
        """Return the longest context, in tokens for each of `batch` rows, that fits `memory` bytes, to 0.8 %, or 0."""
        return STEP * self._largest(memory, lambda n: (way, batch, n * STEP), parts=128)

    def largest(self, memory: int, way: Way, context: int) -> int:
        """Return the largest number of rows of `context` tokens each that fits `memory` bytes, or 0 if no row fits."""
        return self._largest(memory, lambda n: (way, n, context))

    def _largest(self, memory: int, case: Callable[[int], tuple[Way, int, int]], parts: int | None = None) -> int:
        """Return the largest n whose case fits. The count of tensors alone is faster, and gives an upper bound."""

        def alive(n: int) -> int:
            parts = self.memory(*case(n))
            return parts.weights + parts.cache + parts.activations + self.fixed

        return _last(lambda n: self.fits(memory, *case(n)), _largest(alive, memory, parts), parts)

    def _followed(
        self, way: Way, batch: int, context: int, limit: int | None = None
    ) -> tuple[LiveMemory, CachingAllocator, int]:
        """Simulate every allocation of a `generate`, in one call of each kind. Also returns the full cache's bytes."""
        allocator = CachingAllocator(limit)
        live = LiveMemory(allocator)
        for n_bytes in (*self._weights, batch * context * TOKEN_BYTES):
            live.hold(n_bytes)
        geometries = self._geometries(way, batch, context)
        specs: list[LayerSpec | None] = [None] * len(geometries) if way.specs is None else [*way.specs]
        plans: dict[Hashable, activations.Planned | None] = {}
        read = {spec.reads for spec in model_layers(self.config) if spec is not None}
        layers = [
            activations.CountedLayer(*layer, plans, i in read)
            for i, layer in enumerate(zip(geometries, specs, strict=True))
        ]
        cache, rewritten = 0, list[int]()
        for layer in layers:
            if layer.spec is not None:
                rewritten.append(_rewritten(layer))
                cache += -(-layer.arena.nbytes // ROUNDING) * ROUNDING
                live.hold(layer.arena.nbytes)
        with self._counted() as model:
            for tokens, past in self._calls(way, context):
                with live:  # copies of layer state that the call keeps while it runs (`cache/interrupted.py`)
                    kept = [torch.empty(n, dtype=torch.uint8, device="meta") for n in rewritten if past and tokens > 1]
                activations.run(model, layers, tokens, past, live)
                del kept
        stock = sum(tensor.nbytes for layer in layers for tensor in layer.stock.values())
        return live, allocator, cache or stock

    @contextmanager
    def _counted(self) -> Iterator[PreTrainedModel]:
        with attending(self._model, activations.register(), full=False):
            yield self._model

    def _geometries(self, way: Way, batch: int, context: int) -> list[Geometry]:
        layers = self.config.get_text_config(decoder=True).num_hidden_layers
        sizes = [head_sizes(self.config, i) for i in range(layers)]
        geometries = [Geometry(batch, size.kv, size.dim, size.v_dim, 1, self.dtype) for size in sizes]
        if way.specs is None:
            return geometries
        blocks = [1 if spec is None else packed_layer(spec, context).blocks for spec in way.specs]
        return [replace(geometry, blocks=n) for geometry, n in zip(geometries, blocks, strict=True)]

    def _calls(self, way: Way, context: int) -> Iterator[tuple[int, int]]:
        """Yield new tokens and earlier tokens of the calls that differ.

        These are the first and the last whole chunk of the prompt, the remaining tokens, and the last decode step."""
        own = None if way.specs is None else self.prefill_chunk_size or chunk_of(filter(None, way.specs))
        chunk = min(own or context, context)
        whole, rest = divmod(context - 1 or 1, chunk)
        if whole:
            yield chunk, 0
        if whole > 1:
            yield chunk, (whole - 1) * chunk
        if rest:
            yield rest, whole * chunk
        yield 1, context - 1


def _rewritten(layer: activations.CountedLayer) -> int:
    """Return the bytes of a packed layer that a call may change. It may move the blocks of a window."""
    return rewritten_bytes(layer.layout) if window_of(layer.layout.spec) is None else layer.arena.nbytes


def _last(fits: Callable[[int], bool], most: int, parts: int | None) -> int:
    """Return the largest n up to `most` that fits, or 0 if none does.

    Smaller n are assumed to fit if a larger one does.

    Args:
        fits: whether a number fits.
        most: upper bound of the result.
        parts: the result may be too small by up to `1 / parts`.
    """
    if most == 0 or fits(most):
        return most
    low, high, step = 0, most, max(1, most // 32)  # gaps between tensors are usually a tenth or less
    while high - low > (max(1, high // parts) if parts else 1):
        guess = (low + high) // 2 if low else max(1, high - step)
        low, high, step = (guess, high, step) if fits(guess) else (low, guess, 2 * step)
    return low


def _largest(total: Callable[[int], int], memory: int, parts: int | None = None) -> int:
    """Return the largest n with `total(n) <= memory`, or 0 if even `total(1)` is more.

    Args:
        total: grows with n, nearly linearly, so interpolated guesses are good.
        parts: the result may be too small by up to `1 / parts`.
    """
    low, high, below, above = 0, 1, 0, total(1)
    while above <= memory and high < MOST:
        low, below, high = high, above, 8 * high
        above = total(high)
    while low and high - low > (step := max(1, low // parts if parts else 1)):
        guess = low + (high - low) * (memory - below) // max(1, above - below)
        for n in (guess - step // 2, guess - step // 2 + step, (low + high) // 2):
            if low < n < high:
                bytes_there = total(n)
                if bytes_there <= memory:
                    low, below = n, bytes_there
                else:
                    high, above = n, bytes_there
    return low
