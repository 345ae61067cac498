"""PyTorch's caching allocator of a GPU, followed without one: how much it takes from CUDA for a sequence of tensors.

It is more than what is alive at once: tensors lie in segments, and what is free between them may fit none that comes.
The rules are those of `c10/cuda/CUDACachingAllocator.cpp` with its default settings, without `expandable_segments`, on
one stream.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 2**20
ROUNDING = 512  # bytes; every block is a multiple of it
SMALL = 1 * MIB  # tensors up to this lie in segments of their own
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
WHOLE = 10 * MIB  # tensors from here on get a segment of their size, in steps of `SMALL_SEGMENT`


@dataclass(eq=False)
class Block:
    """A part of a segment.

    Attributes:
        address: unique, in the order of segments. size: bytes. small: of a segment for small tensors.
        before, behind: neighbours in the segment. free: whether it holds no tensor.
    """

    address: int
    size: int
    small: bool
    before: Block | None = None
    behind: Block | None = None
    free: bool = False


class CachingAllocator:
    """Blocks for tensors, out of segments that are kept when their tensors are freed.

    Args:
        limit: bytes that segments may take; None is no limit.

    Attributes:
        reserved: bytes of all segments. peak: the most that they were.
        failed: whether a tensor did not fit the limit; it was given a segment all the same.
    """

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self.reserved = self.peak = 0
        self.failed = False
        self._next = 0  # address of the next segment
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # by size, of small and large ones

    def allocate(self, n_bytes: int) -> Block:
        """A block for a tensor of so many bytes: the smallest that is free and large enough, else of a new segment."""
        size = max(1, -(-n_bytes // ROUNDING)) * ROUNDING
        small = size <= SMALL
        free = self._free[small]
        at = bisect_left(free, (size, 0))
        block = free.pop(at)[2] if at < len(free) else self._segment(size, small)
        block.free = False
        rest = block.size - size
        if rest >= ROUNDING if small else rest > SMALL:
            behind = Block(block.address + size, rest, small, block, block.behind)
            if block.behind is not None:
                block.behind.before = behind
            block.size, block.behind = size, behind
            self._keep(behind)
        return block

    def free(self, block: Block) -> None:
        """Take a block back, one with the free ones beside it."""
        before, behind = block.before, block.behind
        if behind is not None and behind.free:
            self._drop(behind)
            block.size, block.behind = block.size + behind.size, behind.behind
            if behind.behind is not None:
                behind.behind.before = block
        if before is not None and before.free:
            self._drop(before)
            before.size, before.behind = before.size + block.size, block.behind
            if block.behind is not None:
                block.behind.before = before
            block = before
        self._keep(block)

    def _segment(self, size: int, small: bool) -> Block:
        """A block that is a new segment. If that would pass the limit, those without tensors are given back first."""
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
            empty = [entry for entry in free if entry[2].before is None and entry[2].behind is None]
            self.reserved -= sum(size for size, _, _ in empty)
            free[:] = [entry for entry in free if entry not in empty]

    def _keep(self, block: Block) -> None:
        block.free = True
        insort(self._free[block.small], (block.size, block.address, block), key=lambda entry: entry[:2])

    def _drop(self, block: Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.address), key=lambda entry: entry[:2])]
