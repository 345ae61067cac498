"""Defer the stop check of `generate` where decode steps are replayed, so that the device does not wait for the host.

After each token Transformers asks the device whether all rows have ended. The device is idle while the host waits and
prepares the next step: 0.4 ms per token, measured with one CUDA graph per step on an H200. Transformers'
`DeferredStopCheck` reads the answer one step late. It then removes the extra step from a cache that the caller passed
or gets back. By default Transformers uses it only on Apple GPUs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from qattn_hf.cache.cache import QAttnCache
from qattn_hf.model._compat import DeferredStopCheck


@functools.cache
def defer_stop_checks() -> None:
    """Let `generate` defer the stop check for each `QAttnCache` whose steps are replayed.

    This replaces one method of a Transformers class, once per process. The replacement acts like the original for all
    other caches.
    """
    if DeferredStopCheck is None:
        return
    supported = DeferredStopCheck.is_supported

    @functools.wraps(supported)
    def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
        replayed = device.type == "cuda" and isinstance(cache, QAttnCache) and cache.replays and cache.is_croppable
        return (replayed and not is_assistant) or supported(device, cache, cache_is_returned, is_assistant)

    DeferredStopCheck.is_supported = staticmethod(is_supported)
