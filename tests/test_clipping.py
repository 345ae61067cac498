"""The measurement of clipped ranges: what codes reach over."""

from __future__ import annotations

import pytest
import torch
from test_eval_scripts import script

from qattn_kernels.formats.kivi.reference import asymmetric

clipping = script("clipping")
rotations = clipping.rotations
X = torch.randn(3, 128, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bits", [2, 3])
def test_a_part_is_what_the_setting_makes_of_it(bits: int):
    levels = 2**bits - 1
    low, high = clipping.reach_of(levels / (levels + 0.75))(X, bits)
    got, want = asymmetric(low, high, bits), asymmetric(*rotations.whole(X, bits), bits, 0.75)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-10, atol=2**-10)  # a unit of fp16, of numbers below 4


def test_least_squares_errs_least():
    def error(part: float | str) -> torch.Tensor:
        return (rotations.by_reach(X, *clipping.reach_of(part)(X, 2), 2) - X).square().sum(-2)

    least = error(clipping.LEAST)
    assert all((least <= error(part) * (1 + 1e-6)).all() for part in clipping.SEARCHED)
    assert least.sum() < 0.7 * error(1.0).sum()
