"""Stop checks of `generate` that the host does not wait for, where decode steps are replayed.

After each token transformers asks the device whether all rows have ended. While the host waits and then prepares the
next step the device idles: 0.4 ms a token, as measured with a CUDA graph a step on an H200. transformers' own
`DeferredStopCheck` reads the answer one step late, and takes the step that is then one too many back from a cache that
the caller gave or gets; of itself it does so on Apple's GPUs alone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from qattn_hf.cache.cache import QAttnCache
from qattn_hf.model._compat import DeferredStopCheck


@functools.cache
def defer_stop_checks() -> None:
    """Let `generate` defer the stop check wherever a `QAttnCache` says that its steps are replayed.

    This replaces one method of a class of transformers, once a process and for good. The replacement answers as before
    for every other cache.
    """
    if DeferredStopCheck is None:
        return
    supported = DeferredStopCheck.is_supported

    @functools.wraps(supported)
    def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
        replayed = device.type == "cuda" and isinstance(cache, QAttnCache) and cache.replays and cache.is_croppable
        return (replayed and not is_assistant) or supported(device, cache, cache_is_returned, is_assistant)

    DeferredStopCheck.is_supported = staticmethod(is_supported)
