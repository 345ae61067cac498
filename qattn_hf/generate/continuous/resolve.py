"""Resolve a model and a `ContinuousBatchingConfig` for packed pages."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from qattn_hf.errors import UnsupportedError
from qattn_hf.generate.continuous.admission import positions_of
from qattn_hf.generate.continuous.pool import bound_on_host
from qattn_hf.generate.continuous.transformers_api import continuous_api
from qattn_hf.generate.patched import patch_of
from qattn_hf.layer.memory_budget import BudgetLayerSpec
from qattn_hf.model.tensor_parallel import shard_of
from qattn_kernels.layer.arena import Layout
from qattn_kernels.layer.spec import LayerSpec
from qattn_kernels.layout import Geometry

# settings of Transformers' `ContinuousBatchingConfig` that packed pages do not support
NOT_YET = {
    "use_cuda_graph": "captured steps",
    "use_async_batching": "asynchronous batching",
    "varlen_compile_config": "compiled steps",
    "decode_compile_config": "compiled steps",
    "default_compile_level": "compiled steps",
    "cpu_offload_space": "offloading to the CPU",
}


def layouts(model: PreTrainedModel) -> list[Layout]:
    """Return the layout of each layer's pages.

    Raises:
        UnsupportedError: the recipe or the model has layers without packed pages.
    """
    patched = patch_of(model)
    if not patched.recipe.settings.packs():
        raise UnsupportedError("cache='model' packs nothing: unpatch(model), and transformers batches by itself")
    if shard_of(model).size > 1 or len({x.device for x in model.parameters()}) > 1:
        raise UnsupportedError("continuous batching of a model on several devices is not supported: use generate")
    if any(isinstance(spec, BudgetLayerSpec) for spec in patched.specs):
        raise UnsupportedError(
            "memory= does not apply to continuous batching, whose page pool has its own size: leave it out, and set "
            "num_blocks"
        )
    full = [spec for spec in patched.specs if type(spec) is LayerSpec and not spec.latent]
    if len(full) < len(patched.specs) or patched.sizes is None:
        raise UnsupportedError(
            "continuous batching packs only layers with full attention, and this model has other layers: use "
            "generate, or unpatch(model)"
        )
    if len({spec.window.block for spec in full}) > 1:
        raise UnsupportedError("the recipe gives layers blocks of different sizes: use generate, or one recipe for all")
    return [
        Layout(Geometry(1, size.kv, size.dim, size.v_dim, 1, model.dtype), spec)
        for spec, size in zip(full, patched.sizes, strict=True)
    ]


def resolved(layouts: Sequence[Layout], config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Transformers' `resolve_continuous_batching_config` for pages of these layers, on a copy of `cb_config`.

    Raises:
        UnsupportedError: `cb_config` uses a setting of `NOT_YET`.
    """
    for name, what in NOT_YET.items():
        value = getattr(cb_config, name, None)
        if any(value) if isinstance(value, tuple) else value:
            raise UnsupportedError(f"{name}={value!r}: packed pages do not support {what}; leave it out")
    own, block = copy.deepcopy(cb_config), layouts[0].spec.window.block
    unsized = own.num_blocks is None and own.max_memory_percent is None
    if own.num_blocks is not None:  # the caller counted in blocks of the caller's size
        own.num_blocks = math.ceil(own.num_blocks * own.page_size / block)
    own.page_size, own.max_blocks_per_request = block, 0
    own.use_cuda_graph, own.use_async_batching = False, False
    found = continuous_api.resolve_continuous_batching_config(config, own, *args, **kwargs)
    if unsized and kwargs["device"].type == "cpu":
        bound_on_host(layouts, found, positions_of(config))
    found.varlen_compile_config = found.decode_compile_config = None  # set by a checkpoint's generation config
    return found
