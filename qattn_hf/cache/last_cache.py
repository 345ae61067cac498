"""The last cache of a patched model, per thread."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qattn_hf.cache.cache import QAttnCache


class LastCache:
    """The last cache of a patched model, for its report. Copies and pickles of the model start without one.

    The cache is kept until the next one is made or the model is unpatched. Each thread has a separate last cache, so
    threads that share a model see their own calls. A thread that made no cache sees the newest.

    Attributes:
        pages: figures of the last pool of continuous batching (`continuous.cache.PagedCache`), without the pool.
    """

    def __init__(self) -> None:
        self._of_threads: weakref.WeakKeyDictionary[threading.Thread, QAttnCache] = weakref.WeakKeyDictionary()
        self._newest: QAttnCache | None = None
        self.pages: dict[str, Any] | None = None
        self._skipping: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def __deepcopy__(self, memo: Any) -> LastCache:
        return LastCache()

    def __reduce__(self) -> Any:
        return LastCache, ()

    @property
    def cache(self) -> QAttnCache | None:
        """The last cache of the calling thread, or the newest of all threads; None before the first."""
        own = self._of_threads.get(threading.current_thread())
        return self._newest if own is None else own

    def record(self, cache: QAttnCache) -> None:
        """Make `cache` the calling thread's last one, unless `skip_next` was set."""
        thread = threading.current_thread()
        if thread in self._skipping:
            self._skipping.discard(thread)
            return
        self._of_threads[thread] = self._newest = cache

    def skip_next(self, whether: bool) -> None:
        """Set whether `record` ignores this thread's next cache: guidance makes a second one during `generate`."""
        thread = threading.current_thread()
        (self._skipping.add if whether else self._skipping.discard)(thread)

    def clear(self) -> None:
        """Forget the caches of all threads."""
        self._of_threads.clear()
        self._newest = self.pages = None
