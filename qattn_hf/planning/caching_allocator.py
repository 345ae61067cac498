"""Simulate PyTorch's caching allocator without a GPU: the memory it takes from CUDA for a sequence of tensors.

This is more than the tensors alive at once. Tensors lie in segments, and the free gaps between them may be too small
for the next tensor. The rules follow `c10/cuda/CUDACachingAllocator.cpp` with default settings, on one stream,
without `expandable_segments`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 2**20
ROUNDING = 512  # bytes; the size of every block is a multiple
SMALL = 1 * MIB  # tensors up to this size have separate segments
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
WHOLE = 10 * MIB  # tensors from this size on get a segment of their size, in steps of `SMALL_SEGMENT`


@dataclass(eq=False)
class Block:
    """A part of a segment.

    Attributes:
        address: unique, in the order of segments.
        size: bytes.
        small: whether it belongs to a segment for small tensors.
        before, after: neighbours in the segment, at lower and at higher addresses.
        free: whether it holds no tensor.
    """

    address: int
    size: int
    small: bool
    before: Block | None = None
    after: Block | None = None
    free: bool = False


class CachingAllocator:
    """Allocates blocks for tensors from segments. A segment is kept when its tensors are freed.

    Args:
        limit: bytes that segments may take. None is no limit.

    Attributes:
        reserved: bytes of all segments.
        peak: the most that `reserved` was.
        failed: whether a tensor exceeded the limit. It still got a segment.
    """

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self.reserved = self.peak = 0
        self.failed = False
        self._next = 0  # address of the next segment
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # by size, small and large ones

    def allocate(self, n_bytes: int) -> Block:
        """Return a block for a tensor of `n_bytes`: the smallest sufficient free block, or one from a new segment."""
        size = max(1, -(-n_bytes // ROUNDING)) * ROUNDING
        small = size <= SMALL
        free = self._free[small]
        at = bisect_left(free, (size, 0))
        block = free.pop(at)[2] if at < len(free) else self._segment(size, small)
        block.free = False
        rest = block.size - size
        if rest >= ROUNDING if small else rest > SMALL:
            after = Block(block.address + size, rest, small, block, block.after)
            if block.after is not None:
                block.after.before = after
            block.size, block.after = size, after
            self._keep(after)
        return block

    def free(self, block: Block) -> None:
        """Take a block back, and merge it with free neighbours."""
        before, after = block.before, block.after
        if after is not None and after.free:
            self._drop(after)
            block.size, block.after = block.size + after.size, after.after
            if after.after is not None:
                after.after.before = block
        if before is not None and before.free:
            self._drop(before)
            before.size, before.after = before.size + block.size, block.after
            if block.after is not None:
                block.after.before = before
            block = before
        self._keep(block)

    def _segment(self, size: int, small: bool) -> Block:
        """Return a block that is a new segment. At the limit, segments without tensors are freed first."""
        whole = LARGE_SEGMENT if size < WHOLE else -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        n_bytes = SMALL_SEGMENT if small else whole
        if self.limit is not None and self.reserved + n_bytes > self.limit:
            self._give_back()
            self.failed = self.failed or self.reserved + n_bytes > self.limit
        self.reserved += n_bytes
        self.peak = max(self.peak, self.reserved)
        self._next += n_bytes
        return Block(self._next - n_bytes, n_bytes, small)

    def _give_back(self) -> None:
        for free in self._free.values():
            empty = [entry for entry in free if entry[2].before is None and entry[2].after is None]
            self.reserved -= sum(size for size, _, _ in empty)
            free[:] = [entry for entry in free if entry not in empty]

    def _keep(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.address, block), key=lambda entry: entry[:2])

    def _drop(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.address), key=lambda entry: entry[:2])]
