"""Errors of a key's channels that make up for one another, against GPTQ's definition and by hand."""

from __future__ import annotations

import pytest
import torch

from qattn_hf.attention.model_constants.compensation import DAMP, shares
from qattn_kernels.formats.kivi.reference import TOGETHER, asymmetric, encode, encode_compensated


def one(x: list[float], share: float, steps: tuple[float, float] = (1.0, 1.0)) -> list[int]:
    """Codes of two channels of a key, the last ones of two groups, from 0 in these steps; the second makes up for
    `share` of the first's error."""
    keys, scale, compensation = torch.zeros(1, 1, 1, 16), torch.ones(1, 1, 16).half(), torch.zeros(1, 16, 16)
    keys[..., 7::8], scale[..., 7::8], compensation[0, 15, 7] = torch.tensor(x), torch.tensor(steps), share
    codes = encode_compensated(keys, scale, torch.zeros(1, 1, 16).half(), 2, compensation.half())[0, 0, 0].tolist()
    assert codes[:7] == codes[8:15] == [0] * 7
    return codes[7::8]


def test_an_error_is_taken_off_the_channels_behind_it_by_hand():
    """0.4 is read as 0; of the error of 0.4 half is taken off 1.6, and 1.4 is nearer to 1."""
    assert one([0.4, 1.6], 0.0) == [0, 2] and one([0.4, 1.6], 0.5) == [0, 1]
    assert one([0.4, 1.6], -0.5) == [0, 2] and one([0.4, 1.4], -0.5) == [0, 2]


def test_shares_are_of_numbers_not_of_steps():
    """Half of an error of 3/8 is subtracted from 3 3/16, with a step of 2.

    The result 3 is 1.5 steps and rounds to the even code 2. With an error of 13/32 the result is slightly below 1.5
    steps.
    """
    assert one([3 / 8, 3 + 3 / 16], 0.5, steps=(1, 2)) == [0, 2]
    assert one([13 / 32, 3 + 3 / 16], 0.5, steps=(1, 2)) == [0, 1]


def test_channels_without_a_step_neither_give_nor_take():
    assert one([0.4, 1.6], 0.5, steps=(1, 0)) == [0, 0] and one([0.4, 1.6], 0.5, steps=(0, 1)) == [0, 2]


def test_of_an_error_beyond_a_step_one_step_is_passed_on():
    """5 is read as 3; 2 steps would leave nothing of the other channel."""
    assert one([5.0, 1.6], 0.9) == [3, 1] and one([-4.0, 1.6], 0.9) == [0, 2]


def correlated(dim: int = 64) -> torch.Tensor:
    """Queries of two heads whose channels go together, most of them in three directions: `[2, 500, dim]`."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(2, dim, dim, generator=generator)
    mixed *= torch.tensor([8.0, 4.0, 2.0] + [0.5] * (dim - 3))[:, None]
    return torch.randn(2, 500, dim, generator=generator) @ mixed


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_errors_are_smaller_where_queries_multiply_them_and_larger_elsewhere(bits: int):
    keys = torch.randn(3, 2, 128, 64, generator=torch.Generator().manual_seed(1))
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


@pytest.mark.parametrize("dim", [8, 20, 64])  # one group; two and the half of one; eight
def test_a_share_is_what_makes_up_for_most_of_an_error(dim: int):
    """The correction is the least-squares solution over all channels in later groups for the error of the channels in a
    group."""
    queries = correlated(dim).double()
    moment = queries.mT @ queries
    moment += DAMP * moment.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(dim).double()
    found, group = shares(queries.mT @ queries).double(), torch.arange(dim) // TOGETHER
    for i in range(max(group) + 1):
        mine, behind = group == i, group > i
        best = -torch.linalg.solve(moment[:, behind][..., behind], moment[:, behind][..., mine])
        torch.testing.assert_close(found[:, behind][..., mine], best, atol=1e-3, rtol=2e-3)  # in fp16
        assert not found[:, ~behind][..., mine].any()
