"""The measurement of error compensation: what is rounded so errs less where queries multiply it."""

from __future__ import annotations

import torch
from test_eval_scripts import script

from qattn_kernels.formats.kivi.reference import asymmetric, encode

compensation = script("compensation")


def test_errors_are_smaller_where_queries_multiply_them_and_larger_elsewhere():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 3, 128, 16, generator=generator)
    mixed = torch.randn(2, 16, 16, generator=generator) * torch.tensor([8.0, 4.0, 2.0] + [0.5] * 13)[:, None]
    queries = torch.randn(2, 500, 16, generator=generator) @ mixed
    step, zero = (x[..., None, :] for x in asymmetric(keys.amin(-2), keys.amax(-2), 2))
    alone = encode(keys, step, zero, 2) * step.float() + zero.float()
    upper = compensation.factor((queries.mT @ queries).double(), 0.01)
    both = compensation.compensated(keys, step, zero, 2, upper)

    def loss(read: torch.Tensor) -> float:
        return ((read - keys).transpose(0, 1).flatten(1, 3) @ queries.mT).square().mean().item()

    assert loss(both) < 0.5 * loss(alone)
    assert (both - keys).square().mean() > (alone - keys).square().mean()


def test_without_correlations_nothing_is_compensated():
    keys = torch.randn(1, 1, 1, 128, 8, generator=torch.Generator().manual_seed(0))
    step, zero = (x[..., None, :] for x in asymmetric(keys.amin(-2), keys.amax(-2), 2))
    upper = compensation.factor(torch.eye(8).double()[None], 0.1)
    want = encode(keys, step, zero, 2) * step.float() + zero.float()
    torch.testing.assert_close(compensation.compensated(keys, step, zero, 2, upper), want)
