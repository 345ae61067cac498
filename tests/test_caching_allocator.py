"""PyTorch's caching allocator as it is followed: hand-worked sequences, what always holds, and a GPU's own."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qattn_hf.planning.caching_allocator import LARGE_SEGMENT, MIB, ROUNDING, SMALL_SEGMENT, Block, CachingAllocator


def test_a_part_of_a_free_block_is_used_and_the_rest_kept():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(100 * MIB))
    first, second = allocator.allocate(30 * MIB), allocator.allocate(30 * MIB)
    assert allocator.reserved == 100 * MIB and second.address == first.address + first.size
    allocator.allocate(60 * MIB)
    assert allocator.reserved == 160 * MIB, "40 MiB are free, and do not hold 60"
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate(100 * MIB).size == 100 * MIB and allocator.reserved == 160 * MIB


@pytest.mark.parametrize(
    ("n_bytes", "segment"),
    [(1, SMALL_SEGMENT), (MIB, SMALL_SEGMENT), (MIB + 1, LARGE_SEGMENT), (10 * MIB, 10 * MIB), (11 * MIB, 12 * MIB)],
)
def test_segments_have_the_sizes_of_torch(n_bytes, segment):
    allocator = CachingAllocator()
    block = allocator.allocate(n_bytes)
    assert allocator.reserved == segment and block.size % ROUNDING == 0 and block.size >= n_bytes


def test_the_rest_of_a_large_block_stays_with_it_up_to_a_mib():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB))
    assert allocator.allocate(11 * MIB).size == 12 * MIB


def test_segments_without_tensors_are_given_back_at_the_limit():
    allocator = CachingAllocator(limit=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert allocator.reserved == 80 * MIB and allocator.peak == 80 * MIB and not allocator.failed
    allocator.allocate(30 * MIB)
    assert allocator.failed


SIZES = st.one_of(st.integers(1, 3 * MIB), st.integers(MIB // 2, 40 * MIB))


@given(st.lists(st.tuples(SIZES, st.booleans(), st.integers(0, 10**6)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_blocks_never_overlap_and_all_that_is_freed_is_merged(steps):
    allocator, alive = CachingAllocator(), list[Block]()
    for n_bytes, frees, which in steps:
        alive.append(allocator.allocate(n_bytes))
        if frees:
            allocator.free(alive.pop(which % len(alive)))
        places = sorted((block.address, block.address + block.size) for block in alive)
        assert all(end <= start for (_, end), (start, _) in pairwise(places))
        assert allocator.peak >= allocator.reserved >= sum(block.size for block in alive)
    for block in alive:
        allocator.free(block)
    free = [entry for entries in allocator._free.values() for entry in entries]
    assert sum(size for size, _, _ in free) == allocator.reserved
    assert all(block.before is None and block.after is None for _, _, block in free)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: its allocator is what is followed")
@pytest.mark.parametrize("seed", range(4))
def test_a_gpu_reserves_as_much(seed):
    """Allocate 400 tensors of 1 KiB to 200 MiB on a separate stream, and free half of them in random order."""
    rng, allocator = random.Random(seed), CachingAllocator()
    alive: list[tuple[Any, Block]] = []
    torch.cuda.empty_cache()
    with torch.cuda.stream(torch.cuda.Stream()):  # what other tests left free belongs to other streams
        before = torch.cuda.memory_reserved()
        for _ in range(400):
            n_bytes = int(2 ** rng.uniform(10, 27.6))
            alive.append((torch.empty(n_bytes, dtype=torch.uint8, device="cuda"), allocator.allocate(n_bytes)))
            if rng.random() < 0.55:
                tensor, block = alive.pop(rng.randrange(len(alive)))
                del tensor
                allocator.free(block)
            assert torch.cuda.memory_reserved() - before == allocator.reserved
        alive.clear()
    torch.cuda.empty_cache()
