"""KIVI with groups smaller than a head: a decode reads several blocks as one tile, compared with the specification."""

from __future__ import annotations

import pytest
import torch
from helpers import error, make_layer
from test_fused_kernels import differing, feed, inputs

from qattn_kernels.step.kernels import fused_step
from qattn_kernels.step.reference import reference_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]
SMALL_GROUPS = [(32, bits, dim) for bits in (2, 4) for dim in (64, 80, 128)]
SMALL_GROUPS += [(64, bits, dim) for bits in (2, 4) for dim in (80, 128)]
POOL = {"sink_num": 2, "sink_window": 1}
ONE_BLOCK = ({"token_norm": True}, {"k_bits": 3}, {"sparse_v_tau": 1e-9})  # read one block at a time


@pytest.mark.parametrize(("size", "bits", "dim"), SMALL_GROUPS)
@pytest.mark.parametrize("setting", ({}, POOL, *ONE_BLOCK), ids=str)
def test_values_of_small_groups_of_channels(size: int, bits: int, dim: int, setting: dict):
    """Scales and zero points of a token's groups of channels, far apart, act on their own channels alone, and a tile of
    several blocks ends where the context does: 192 tokens are one and a half."""
    q, k, v = inputs(1, 196, heads=1, group=2, dim=dim)
    groups = torch.arange(dim, device=v.device) // size % 2
    qkv = (q, k, torch.where(groups == 1, 3 + 5 * v, v))
    case = ("kivi", {"bits": bits, "group_size": size, "residual_length": 0, **setting})
    one, other = make_layer(case, 256, 1), make_layer(case, 256, 1)
    want, got = feed(reference_step, one, qkv, [195, 196])[1], feed(fused_step, other, qkv, [195, 196])[1]
    assert differing(one, other) == []
    # INT8 pairs err by 2^-15 of the weights of the group with the largest scales, five times the others', of odd
    # quarters of 2 bits four times as much
    for group in range(2):
        assert error(got[..., groups == group], want[..., groups == group]) < (4e-3 if bits == 2 else 1e-3)


@pytest.mark.parametrize("size", [32, 64])
def test_zero_points_of_keys_that_a_query_does_not_see(size: int):
    """What all keys of a block share, 50 times as large as what tells them apart and orthogonal to the query: products
    with zero points are large and sum to nothing. Queries of 11 bits in place of 22 err by more than a thousandth."""
    q, k, v = inputs(1, 196, heads=1, group=2, dim=128)
    shared = torch.randn(4, 128, generator=torch.Generator().manual_seed(1)).sign().to(k.device)
    basis = torch.linalg.qr(q[0, :, -1].T).Q
    shared = 50 * (shared - shared @ basis @ basis.T)
    k = k + shared[torch.arange(196, device=k.device) // 64]
    case = ("kivi", {"bits": 4, "group_size": size, "residual_length": 0})
    want, got = (feed(run, make_layer(case, 256, 1), (q, k, v), [195, 196])[1] for run in (reference_step, fused_step))
    assert error(got, want) < 1e-3
