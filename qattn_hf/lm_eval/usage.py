"""Usage of a task's requests: time, bytes, and how much was read from packed tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from qattn_hf.cache.cache import QAttnCache
from qattn_hf.cache.reporting import report


class Held(NamedTuple):
    """Bytes of a batch's cache, of the same tokens unpacked, and bits in closed blocks. None: no block is closed."""

    kv_bytes: int
    kv_bytes_full_precision: int
    effective_bits: float | None


def held_by(cache: Any) -> Held:
    """Count bytes and bits of a cache from its tensors."""
    if not isinstance(cache, QAttnCache):
        n_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return Held(n_bytes, n_bytes, None)
    data = report(cache).to_dict()
    return Held(*(data[name] for name in Held._fields))


@dataclass
class Usage:
    """Sums over the batches of one task in this process. A batch of generations may have rows of several tasks.

    Attributes:
        requests, packed_requests: number of rows, and of rows that read packed tokens by the end of a generation or of
            scoring.
        scored, scored_through_packed: number of scored tokens, and of scored tokens that could read packed tokens.
        tokens, generated: number of real tokens read, and generated.
        seconds: time in the model, including prompts. Rows of a batch share its time equally.
        kv_bytes, kv_bytes_full_precision: bytes of the caches after each batch, and of the same tokens unpacked.
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

    def add_held(self, held: Held) -> None:
        """Add the bytes and bits of a batch's cache."""
        self.batches += 1
        self.kv_bytes += held.kv_bytes
        self.kv_bytes_full_precision += held.kv_bytes_full_precision
        if held.effective_bits is not None:
            self.effective_bits += held.effective_bits
            self.batches_with_bits += 1

    def add_generated(self, tokens: int, generated: int, packed: int, seconds: float) -> None:
        """Add a row: the number of tokens that it read, generated and packed, and its share of the batch's time."""
        self.requests += 1
        self.packed_requests += packed > 0
        self.tokens += tokens
        self.generated += generated
        self.seconds += seconds

    def to_dict(self) -> dict[str, Any]:
        """Return counts, means over batches, and tokens per second: generated ones if there are any, else read ones."""
        n, full = max(1, self.batches), self.kv_bytes_full_precision
        data: dict[str, Any] = {
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
            return {**data, "scored": self.scored, "scored_through_packed": self.scored_through_packed}
        return {**data, "generated": self.generated}
