"""Resolve a `ContinuousBatchingConfig` for packed pages."""

from __future__ import annotations

import copy
import math
from typing import Any

from qattn_hf.errors import UnsupportedError
from qattn_hf.generate.continuous.admission import positions_of
from qattn_hf.generate.continuous.model_pages import ModelPages
from qattn_hf.generate.continuous.pool import bound_on_host
from qattn_hf.generate.continuous.transformers_api import continuous_api
from qattn_hf.model.with_names import with_names

# settings of Transformers' `ContinuousBatchingConfig` that packed pages do not support
NOT_YET = {
    "use_cuda_graph": "captured steps",
    "use_async_batching": "asynchronous batching",
    "varlen_compile_config": "compiled steps",
    "decode_compile_config": "compiled steps",
    "default_compile_level": "compiled steps",
    "cpu_offload_space": "offloading to the CPU",
}


def resolved(pages: ModelPages, config: Any, cb_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Transformers' `resolve_continuous_batching_config` for these pages, on a copy of `cb_config`.

    Raises:
        UnsupportedError: `cb_config` uses a setting of `NOT_YET`.
    """
    for name, what in NOT_YET.items():
        value = getattr(cb_config, name, None)
        if any(value) if isinstance(value, tuple) else value:
            raise UnsupportedError(f"{name}={value!r}: packed pages do not support {what}; leave it out")
    own, block = copy.deepcopy(cb_config), pages.block
    unsized = own.num_blocks is None and own.max_memory_percent is None
    if own.num_blocks is not None:  # the caller counted in blocks of the caller's size
        own.num_blocks = math.ceil(own.num_blocks * own.page_size / block)
    own.page_size, own.max_blocks_per_request = block, 0
    own.use_cuda_graph, own.use_async_batching = False, False
    resolve = with_names(
        continuous_api.resolve_continuous_batching_config,
        ensure_decode_fast_path_is_available=lambda *args, **kwargs: None,  # raises for layer types without stock pages
    )
    found = resolve(config, own, *args, **kwargs)
    if unsized and kwargs["device"].type == "cpu":
        bound_on_host(pages, found, positions_of(config))
    found.varlen_compile_config = found.decode_compile_config = None  # set by a checkpoint's generation config
    return found
