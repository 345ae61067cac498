"""The capacity of `generate`'s caches, and which calls take the arenas of earlier ones; no model runs."""

from __future__ import annotations

import weakref

import pytest
import torch
from helpers import tiny_llama

from qattn_hf import QAttnCache, patch
from qattn_hf.cache.pool import SPARE, Pool, with_spare
from qattn_hf.layer.layer import QAttnLayer

KEYS = torch.zeros(1, 2, 1, 16)


def first_call(pool: Pool, tokens: int, fixed: bool = False) -> weakref.ref[QAttnLayer]:
    """The first layer of a cache for `tokens` tokens, as its first call leaves it; the cache is freed."""
    patched = patch(tiny_llama(), "turbo")._qattn
    cache = QAttnCache(patched.specs, patched.recipe, tokens if fixed else None, pool=pool)
    cache.plan(tokens)
    for i in range(2):
        cache.update(KEYS, KEYS, i)
    return weakref.ref(cache.layers[0])


def test_lengths_that_vary_share_a_capacity():
    """The first call has what it needs. After it, calls of similar length take the same arenas, with their captured
    steps."""
    pool = Pool()
    found = [first_call(pool, tokens) for tokens in (32_808, 33_000, 33_300, 33_700, 32_900, 34_000)]
    first, *others = (layer() for layer in found)
    assert first.capacity == 32_832
    assert others[0] is not first and others[0].capacity == 33_792
    assert all(layer is others[0] for layer in others[:4])
    assert others[4] is not others[0] and others[4].capacity == 34_816


def test_equal_lengths_have_no_spare_room():
    pool = Pool()
    found = [first_call(pool, tokens) for tokens in (32_808, 32_800, 32_808)]
    assert len({layer() for layer in found}) == 1
    assert pool.idle[0][0].capacity == 32_832


def test_a_capacity_that_the_user_fixed_has_no_spare_room():
    pool = Pool()
    found = [first_call(pool, tokens, fixed=True) for tokens in (4096, 4544)]
    assert [layer().capacity for layer in found] == [4096, 4544]


@pytest.mark.parametrize("blocks", [1, 2, 31, 63, 64, 65, 127, 513, 1023, 1025, 100_000])
def test_spare_room_is_a_32nd_at_most(blocks):
    assert blocks <= with_spare(blocks) <= blocks + blocks // SPARE
    assert with_spare(with_spare(blocks)) == with_spare(blocks)
