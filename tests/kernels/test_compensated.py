"""Errors of a key's channels that make up for one another, against GPTQ's definition and by hand."""

from __future__ import annotations

import pytest
import torch

from qattn_hf.compensation import shares
from qattn_kernels.formats.kivi.reference import asymmetric, encode, encode_compensated


def one(x: list[float], share: float) -> list[int]:
    """Codes of a key of two channels with steps of 1 from 0, of which the second makes up for `share` of the first's
    error."""
    scale, zero_point = torch.ones(1, 1, 2).half(), torch.zeros(1, 1, 2).half()
    compensation = torch.tensor([[[0.0, share], [0.0, 0.0]]]).half()
    return encode_compensated(torch.tensor([[[x]]]), scale, zero_point, 2, compensation)[0, 0, 0].tolist()


def test_an_error_is_taken_off_the_channels_behind_it_by_hand():
    """0.4 is read as 0; of the error of 0.4 half is taken off 1.6, and 1.4 is nearer to 1."""
    assert one([0.4, 1.6], 0.0) == [0, 2] and one([0.4, 1.6], 0.5) == [0, 1]
    assert one([0.4, 1.6], -0.5) == [0, 2] and one([0.4, 1.4], -0.5) == [0, 2]


def test_of_an_error_beyond_a_step_one_step_is_passed_on():
    """5 is read as 3; 2 steps would leave nothing of the other channel."""
    assert one([5.0, 1.6], 0.9) == [3, 1] and one([-4.0, 1.6], 0.9) == [0, 2]


def correlated(dim: int = 16) -> torch.Tensor:
    """Queries of two heads whose channels go together, most of them in three directions: `[2, 500, dim]`."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(2, dim, dim, generator=generator)
    mixed *= torch.tensor([8.0, 4.0, 2.0] + [0.5] * (dim - 3))[:, None]
    return torch.randn(2, 500, dim, generator=generator) @ mixed


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_errors_are_smaller_where_queries_multiply_them_and_larger_elsewhere(bits: int):
    keys = torch.randn(3, 2, 128, 16, generator=torch.Generator().manual_seed(1))
    queries = correlated()
    scale, zero_point = asymmetric(keys.amin(-2), keys.amax(-2), bits)
    codes = (
        encode(keys, scale[..., None, :], zero_point[..., None, :], bits),
        encode_compensated(keys, scale, zero_point, bits, shares(queries.mT @ queries)),
    )
    errors = [x * scale.float()[..., None, :] + zero_point.float()[..., None, :] - keys for x in codes]
    of_scores = [(error.transpose(0, 1).flatten(1, 2) @ queries.mT).square().mean() for error in errors]
    assert of_scores[1] < 0.5 * of_scores[0]
    assert errors[1].square().mean() > errors[0].square().mean()


def test_without_correlations_nothing_is_compensated():
    """Nor where no query has come at all."""
    assert not shares(torch.eye(8)[None]).any() and not shares(torch.zeros(1, 8, 8)).any()


def test_a_share_is_what_makes_up_for_most_of_an_error():
    """GPTQ's `U[i, j] / U[i, i]`: to what the first channel lost, the least squares of the others."""
    queries = correlated().double()
    moment = queries.mT @ queries
    moment += 0.1 * moment.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(16).double()  # as in GPTQ
    best = -torch.linalg.solve(moment[:, 1:, 1:], moment[:, 1:, :1])[..., 0]
    found = shares(queries.mT @ queries)[:, 0, 1:]
    torch.testing.assert_close(found.double(), best, atol=1e-3, rtol=2e-3)  # in fp16
