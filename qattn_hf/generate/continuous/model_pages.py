"""What the layers of a model keep in continuous batching: pages of the pool, or pages of a row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from transformers import PreTrainedModel

from qattn_hf.errors import UnsupportedError
from qattn_hf.generate.continuous.page_layout import keeps_rows, mean_page_bytes, row_bytes, shares_pages
from qattn_hf.generate.continuous.rings import ring_bytes, ring_of
from qattn_hf.generate.patched import patch_of
from qattn_hf.layer.memory_budget import BudgetLayerSpec
from qattn_hf.model.decoder import decoder_of
from qattn_hf.model.heads import head_sizes
from qattn_hf.model.layer_kinds import ModelLayerSpec, own_states
from qattn_hf.model.tensor_parallel import shard_of
from qattn_kernels.layer.arena import ALIGNMENT, Layout
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import Geometry

SHARE_OF_ROWS = 0.25  # largest share of the memory for rows without windows, so that enough is left for pages
MOST_OF_ROWS = 0.75  # the same with windows, whose pages are in the rows
REQUEST = 4096  # tokens of a request for which rows with windows and pages run out together


class ModelPages(NamedTuple):
    """Layouts of a model's layers.

    Attributes:
        layouts: layout of each layer that holds keys and values, by index.
        reads: for each layer that attends to an earlier layer's keys and values, the index of that layer.
    """

    layouts: dict[int, Layout]
    reads: dict[int, int]

    @property
    def every(self) -> list[Layout]:
        """Layouts of all layers that hold keys and values."""
        return list(self.layouts.values())

    @property
    def pooled(self) -> list[Layout]:
        """Layouts of the layers whose pages are in the pool: those without a window."""
        return [layout for layout in self.every if ring_of(layout.spec) is None]

    @property
    def windowed(self) -> bool:
        """Whether some layers have a window. Requests then share no prefix, because a window keeps only a row's end."""
        return len(self.pooled) < len(self.every)

    @property
    def shares_pages(self) -> bool:
        """Whether a request may begin with the pages of another one (`page_layout.shares_pages`)."""
        return not self.windowed and all(map(shares_pages, self.every))

    @property
    def keeps_rows(self) -> bool:
        """Whether a request may begin with the row of another one (`page_layout.keeps_rows`)."""
        return not self.windowed and all(map(keeps_rows, self.every))

    @property
    def block(self) -> int:
        """Tokens of a block of the pool."""
        return (self.pooled or self.every)[0].spec.window.block

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the pool. If all layers have windows, a block only counts tokens."""
        return mean_page_bytes(self.pooled) * len(self.pooled) if self.pooled else ALIGNMENT

    @property
    def share_of_rows(self) -> float:
        """Largest share of the memory for what requests take outside of the pool."""
        if not self.windowed:
            return SHARE_OF_ROWS
        row = self.request_bytes()
        return min(MOST_OF_ROWS, row / (row + REQUEST // self.block * self.block_bytes))

    def request_bytes(self, blocks: int = 1) -> int:
        """Return the bytes that a request of at most `blocks` blocks takes outside of the pool."""
        return sum(row_bytes(layout, blocks) + ring_bytes(layout) for layout in self.every)


def pages_of_model(model: PreTrainedModel) -> ModelPages:
    """Return what the layers of a patched model keep in continuous batching.

    Raises:
        UnsupportedError: the recipe or the model has layers without packed pages.
    """
    patched = patch_of(model)
    if not patched.recipe.settings.packs():
        raise UnsupportedError("cache='model' packs nothing: unpatch(model), and transformers batches by itself")
    if shard_of(model).size > 1 or len({x.device for x in model.parameters()}) > 1:
        raise UnsupportedError("continuous batching of a model on several devices is not supported: use generate")
    specs = patched.recipe.layer_specs(model.config, patched.device_type, paged=True)
    packed = {index: spec for index, spec in enumerate(specs) if isinstance(spec, LayerSpec)}
    check_layers(specs)
    _check_modules(model, packed)
    reads = {index: getattr(spec, "reads", None) for index, spec in enumerate(specs)}
    return ModelPages(
        {index: _layout(model, index, spec) for index, spec in packed.items()},
        {index: source for index, source in reads.items() if source is not None},
    )


def _layout(model: PreTrainedModel, index: int, spec: LayerSpec) -> Layout:
    size = head_sizes(model.config, index)
    return Layout(Geometry(1, size.kv, size.dim, size.v_dim, 1, model.dtype), spec)


def _check_modules(model: PreTrainedModel, packed: Iterable[int]) -> None:
    """Refuse a model that calls a module several times for each token, with another layer of its cache each time.

    The attention function is told the index of the module. Not every version of Transformers tells it the cache's.

    Raises:
        UnsupportedError: a layer of `packed`, indices of the cache's packed layers, has no module of its index.
    """
    modules = {getattr(module, "layer_idx", None) for module in decoder_of(model).modules()}
    if not modules.issuperset(packed):
        raise UnsupportedError(
            "this model calls its layers several times for each token, which has no packed pages: use generate"
        )


def check_layers(specs: list[LayerSpec | ModelLayerSpec]) -> None:
    """Refuse layers without packed pages.

    Args:
        specs: specs of all layers, from `Recipe.layer_specs` with `paged=True`.

    Raises:
        UnsupportedError: the message says which layers, and why.
    """
    packed = [spec for spec in specs if isinstance(spec, LayerSpec)]
    if any(isinstance(spec, BudgetLayerSpec) for spec in packed):
        raise UnsupportedError(
            "memory= does not apply to continuous batching, whose page pool has its own size: leave it out, and set "
            "num_blocks"
        )
    if states := own_states(specs):
        raise UnsupportedError(
            f"this model has {states[0]}. The continuous batching of transformers has no place for its states: of the "
            "layer types, ATTN_TYPE_TO_ALLOCATOR has only full_attention and sliding_attention. Use generate"
        )
    if any(spec.latent for spec in packed):
        raise UnsupportedError(
            "this model has latent attention (MLA), which has no packed pages: use generate, or unpatch(model)"
        )
    if len({spec.window.block for spec in packed if ring_of(spec) is None}) > 1:
        raise UnsupportedError("the recipe gives layers blocks of different sizes: use generate, or one recipe for all")
