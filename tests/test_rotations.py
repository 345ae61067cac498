"""The measurement of rotations from data: its matrices do what they are fitted for, its stores err by their bits."""

from __future__ import annotations

import pytest
import torch
from test_eval_scripts import script

rotations = script("rotations")


def test_a_balanced_side_costs_in_each_direction_what_it_stores():
    """Both moments become one diagonal matrix, so that the sum of their products is the least that a matrix reaches."""
    x = torch.randn(2, 3, 40, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cost, stored = (y * torch.arange(1, 9, dtype=torch.float64) ** power for y, power in zip(x, (1, -1), strict=True))
    cost, stored = cost.mT @ cost, stored.mT @ stored
    matrix = rotations.balanced(cost, stored)
    back = torch.linalg.inv(matrix)
    both = matrix.mT @ stored @ matrix, back @ cost @ back.mT
    torch.testing.assert_close(*both)
    torch.testing.assert_close(both[0], both[0].diagonal(dim1=-2, dim2=-1).diag_embed(), atol=1e-9, rtol=0)


@pytest.mark.parametrize("store", ["kivi", "kivi_norm", "flashq", "token"])
def test_what_is_read_is_near_whatever_it_was_multiplied_by(store: str, monkeypatch):
    """Whole groups err by codes, less with more bits; tokens of an unfinished group do not."""
    generator = torch.Generator().manual_seed(0)
    x, matrix = torch.randn(1, 2, 150, 16, generator=generator), torch.randn(2, 16, 16, generator=generator)
    errors = []
    for bits in (2, 4):
        monkeypatch.setattr(rotations, "chosen", ("K", store, bits, [torch.linalg.qr(matrix)[0]]))
        read = rotations.read(x, 0)
        assert torch.equal(read[:, :, 128:], x[:, :, 128:])
        errors.append((read - x)[:, :, :128].norm() / x.norm())
    assert errors[1] < errors[0] / 3 < 0.2
