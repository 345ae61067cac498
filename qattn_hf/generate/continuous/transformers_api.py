"""Names imported from inside Transformers' continuous batching, in one place.

Tested with Transformers 5.23 and 5.24. Versions without the module `cache_allocators` have another pool.
"""

from __future__ import annotations

import transformers

from qattn_hf.errors import UnsupportedError

try:
    from transformers.generation.continuous_batching import continuous_api
    from transformers.generation.continuous_batching.cache import PagedAttentionCache, PagedAttentionMemoryHandler
    from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION, FullAttentionCacheAllocator
    from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
    from transformers.generation.continuous_batching.continuous_api import (
        ContinuousBatchingManager,
        ContinuousBatchProcessor,
        OutputRouter,
    )
    from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState, RequestStatus
    from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING
except ImportError:  # version too old
    continuous_api = FULL_ATTENTION = None
    PagedAttentionCache = PagedAttentionMemoryHandler = FullAttentionCacheAllocator = object
    ContinuousBatchingManager = ContinuousBatchProcessor = OutputRouter = object
    ContinuousBatchingLogitsProcessorList = GenerationOutput = RequestState = RequestStatus = None
    SCHEDULER_MAPPING = {}

__all__ = [
    "FULL_ATTENTION",
    "SCHEDULER_MAPPING",
    "ContinuousBatchProcessor",
    "ContinuousBatchingLogitsProcessorList",
    "ContinuousBatchingManager",
    "FullAttentionCacheAllocator",
    "GenerationOutput",
    "OutputRouter",
    "PagedAttentionCache",
    "PagedAttentionMemoryHandler",
    "RequestState",
    "RequestStatus",
    "check_version",
    "continuous_api",
]


def check_version() -> None:
    """Check that Transformers' allocators can be replaced.

    Raises:
        UnsupportedError: this version of Transformers has no such allocators.
    """
    if continuous_api is None:
        raise UnsupportedError(
            "continuous batching over packed pages needs transformers 5.23 or later, this is "
            f"{transformers.__version__}: call generate, or unpatch(model)"
        )
