"""What a task's requests cost and how much of them was really read from packed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qattn_hf.cache import QAttnCache
from qattn_hf.reporting import report


@dataclass
class Usage:
    """Sums over the batches of one task, of this process.

    Attributes:
        requests, packed_requests: rows that ran, and those whose cache held packed tokens in the end or, where a text
            was scored, while it was.
        scored, scored_through_packed: tokens that were scored, and those of them that found packed tokens to read.
        tokens, generated: real tokens that were read, and that were written.
        seconds: in the model, prompts included.
        kv_bytes, kv_bytes_full_precision: of the caches at the end of each batch, and of the same tokens unpacked.
    """

    requests: int = 0
    packed_requests: int = 0
    scored: int = 0
    scored_through_packed: int = 0
    tokens: int = 0
    generated: int = 0
    seconds: float = 0.0
    batches: int = 0
    kv_bytes: int = 0
    kv_bytes_full_precision: int = 0
    effective_bits: float = 0.0
    batches_with_bits: int = 0

    def held(self, cache: Any) -> None:
        """Add what a batch's cache holds, from its tensors."""
        self.batches += 1
        if not isinstance(cache, QAttnCache):
            held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
            self.kv_bytes += held
            self.kv_bytes_full_precision += held
            return
        found = report(cache).to_dict()
        self.kv_bytes += found["kv_bytes"]
        self.kv_bytes_full_precision += found["kv_bytes_full_precision"]
        if found["effective_bits"] is not None:
            self.effective_bits += found["effective_bits"]
            self.batches_with_bits += 1

    def to_dict(self) -> dict[str, Any]:
        """Counts, means over batches, and speed: written tokens a second, or read ones where none were written."""
        n, full = max(1, self.batches), self.kv_bytes_full_precision
        found: dict[str, Any] = {
            "requests": self.requests,
            "packed_requests": self.packed_requests,
            "tokens": self.tokens,
            "kv_bytes": self.kv_bytes / n,
            "kv_bytes_full_precision": full / n,
            "kv_share": self.kv_bytes / full if full else None,
            "effective_bits": self.effective_bits / self.batches_with_bits if self.batches_with_bits else None,
            "seconds": self.seconds,
            "tokens_per_second": (self.generated or self.tokens) / self.seconds if self.seconds else None,
        }
        if self.scored:
            return {**found, "scored": self.scored, "scored_through_packed": self.scored_through_packed}
        return {**found, "generated": self.generated}
