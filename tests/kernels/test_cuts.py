"""How kernels cut a context into splits: every block has one split, and sizes are as with exact divisions."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl
from helpers import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

from qattn_hf.methods import get_method
from qattn_kernels.chip import H200
from qattn_kernels.launch.constants import WHOLE, Sizes, sizes_of
from qattn_kernels.launch.tuned import tuned_for
from qattn_kernels.ops.decode.splits import cut_blocks, number_of_splits, range_of, read_rule, split_at
from qattn_kernels.ops.decode.table import encoded, shares_of

pytestmark = pytest.mark.gpu
TUNED = tuned_for(H200).decode
MOST = 2048  # splits of a row that the kernel can return


def sizes(method: str, **values: object) -> Sizes:
    return sizes_of(get_method(method)(**values).last_layer_spec(8), 8, 4, 128, 1, False, False, False)


SINGLE, TILES = sizes("turbo"), sizes("kivi", bits=2, group_size=32, residual_length=32)


@triton.jit
def cut_kernel(BLOCKS, SHARES, OUT, N: tl.constexpr, C: tl.constexpr):
    """Store `split_at` and `range_of` of `N` splits `[3, N]`, then `number_of_splits`. A row has no spare capacity."""
    rule, i, blocks = read_rule(SHARES), tl.arange(0, N), tl.load(BLOCKS)
    cut = cut_blocks(blocks, rule, C)
    begin, end = range_of(cut, i)
    tl.store(OUT + i, split_at(i, blocks, rule))
    tl.store(OUT + N + i, begin)
    tl.store(OUT + 2 * N + i, end)
    tl.store(OUT + 3 * N, number_of_splits(cut))


@settings(deadline=None)  # on a GPU the first example compiles the kernel
@given(
    places=st.integers(100, 4000), heads=st.integers(1, 5000), ring=st.integers(0, 4), pool=st.booleans(),
    blocks=st.none() | st.integers(0, 1 << 18), long=st.sampled_from([TUNED.long, 64]), tiles=st.booleans(),
)  # fmt: skip
def test_each_block_has_one_split(
    places: int, heads: int, ring: int, pool: bool, blocks: int | None, long: int, tiles: bool
):
    size = TILES if tiles else SINGLE
    shares = shares_of(places, heads, size.BLOCK, ring, pool, TUNED._replace(long=long))
    blocks = shares.few * shares.long if blocks is None else blocks  # just long enough
    out = torch.empty(3 * MOST + 1, dtype=torch.int32, device=DEVICE)
    cut_kernel[(1,)](torch.tensor([blocks], dtype=torch.int32, device=DEVICE), encoded(shares), out, MOST, size)
    *rows, (number,) = out.cpu().split([MOST, MOST, MOST, 1])
    at, begin, end = (row.tolist() for row in rows)
    is_long = blocks >= shares.few * shares.long
    much = blocks * shares.part // WHOLE // size.TILE * size.TILE
    large = shares.large if is_long and much else 0
    rest = blocks - large * much
    small = shares.many - shares.large if is_long else shares.few
    little = -(-max(-(-rest // small), shares.least) // size.TILE) * size.TILE
    expected = [much] * large + [min(little, rest - i) for i in range(0, rest, little)]
    edges = list(itertools.accumulate(expected, initial=0))
    assert number == len(expected) <= min(shares.many if is_long else shares.few, blocks)
    assert begin[:number] == edges[:-1] and end[:number] == edges[1:] and edges[-1] == blocks
    assert all(b >= blocks for b in begin[number:])
    assert sorted(at) == list(range(MOST))
    first = shares.large if is_long else 0  # the largest start first, then open tokens
    assert at[: first + shares.open] == [*range(shares.open, shares.open + first), *range(shares.open)]
