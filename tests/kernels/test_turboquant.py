"""TurboQuant's codebooks, its format and llama.cpp's blocks against their definitions."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import feed, make_layer, normal, random_qkv

from qattn_kernels.formats.channel_block.reference import ChannelBlockFormat
from qattn_kernels.formats.lloyd_max import LARGEST_LEVEL, LEVELS, codebook, midpoints
from qattn_kernels.formats.quant_block.reference import QuantBlockFormat
from qattn_kernels.formats.turboquant.reference import TurboQuantFormat
from qattn_kernels.layer.state import side_of
from qattn_kernels.ops.rotate.reference import rotate

BITS = [2, 3, 4]
LLOYD_MAX = {2: 0.1175, 3: 0.03454, 4: 0.009497}  # MSE of the optimal quantizers of the unit normal (Max, 1960)


def restored(fmt: ChannelBlockFormat, x: torch.Tensor) -> torch.Tensor:
    code, scale = fmt.encode(x)
    return fmt.levels(code) * fmt.scales(scale)[..., None]


def mse(fmt: ChannelBlockFormat, x: torch.Tensor) -> float:
    return ((restored(fmt, x) - x).square().mean() / x.square().mean()).item()


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_a_fixed_point_of_lloyds_iteration(bits: int):
    """Each level is the mean of a normal variable in its cell, up to rounding to INT8.

    The rounding moves a level by half a step, and its neighbours' rounding moves the cell by no more than that.
    """

    def density(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def above(x: float) -> float:
        return math.erfc(x / math.sqrt(2)) / 2

    step, edges = LARGEST_LEVEL[bits] / 127, [0.0, *midpoints(bits), math.inf]
    for level, low, high in zip(LEVELS[bits], edges, edges[1:], strict=False):
        mean = (density(low) - density(high)) / (above(low) - above(high))
        assert abs(level * step - mean) < step
    assert len(codebook(bits)) == 2**bits and codebook(bits) == sorted(codebook(bits))


@pytest.mark.parametrize("bits", BITS)
def test_error_is_lloyd_maxs(bits: int):
    """The error on normal numbers is that of Lloyd-Max, for any deviation.

    Cell means have 1 - D of the squared norm; scaled back to the norm their error is 2 - 2 sqrt(1 - D). The vectors are
    long enough to have the deviation of the distribution, within 1 %. Shorter vectors have lighter tails and smaller
    errors.
    """
    expected = 2 - 2 * math.sqrt(1 - LLOYD_MAX[bits])
    errors = {n: mse(TurboQuantFormat(bits=bits, norm_block=0), 7 * normal(2**19 // n, 1, n)) for n in (32, 128, 2048)}
    assert abs(errors[2048] / expected - 1) < 0.01
    assert errors[32] < errors[128] < errors[2048]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("norm_block", [32, 0])
def test_codes_are_the_nearest_and_the_norm_is_kept(bits: int, norm_block: int):
    fmt, x = TurboQuantFormat(bits=bits, norm_block=norm_block), normal(2, 64, 128)
    group = fmt.group(128)
    assert group == (norm_block or 128)
    x = x.unflatten(-1, (-1, group))
    code, _ = fmt.encode(x)
    unit = x / x.square().mean(-1, keepdim=True).sqrt()
    grid = torch.tensor(codebook(bits)) * (LARGEST_LEVEL[bits] / 127)
    distance = (unit[..., None] - grid).abs()
    chosen = distance.gather(-1, code.long()[..., None])[..., 0]
    assert (chosen <= distance.amin(-1) + 1e-6).all(), "another level is nearer"
    norm, kept = x.norm(dim=-1), restored(fmt, x).norm(dim=-1)
    torch.testing.assert_close(kept, norm, rtol=2**-11 + 1e-6, atol=0)  # 11 bits round by 2^-11 at most


@pytest.mark.parametrize("bits", BITS)
def test_what_is_nothing_or_huge_stays_finite(bits: int):
    fmt = TurboQuantFormat(bits=bits)
    assert not restored(fmt, torch.zeros(1, 32)).any()
    assert restored(fmt, torch.full((1, 32), -1e30)).isfinite().all()
    assert (restored(fmt, torch.full((1, 32), -3.0)) + 3 < 0.01).all(), "all alike: every level is that number"


def test_norms_of_blocks_are_worth_their_bits():
    """Where deviations differ from block to block; where they do not, the whole vector's norm is nearly as good."""
    x = normal(2000, 128)
    wide = x * torch.tensor([1.0, 1.0, 1.0, 4.0]).repeat_interleave(32)
    blocks, whole = TurboQuantFormat(bits=3), TurboQuantFormat(bits=3, norm_block=0)

    def both(x: torch.Tensor) -> tuple[float, float]:
        return mse(blocks, x.unflatten(-1, (4, 32))), mse(whole, x[:, None])

    few, many = both(wide)
    assert few < 0.7 * many
    few, many = both(x)
    assert 0.85 < few / many < 1


def test_a_norm_is_of_32_channels_or_of_those_that_are_rotated_together():
    sizes = [(norm_block, dim) for norm_block in (32, 64, 0) for dim in (48, 64, 80, 96, 128)]
    found = [TurboQuantFormat(norm_block=norm_block).group(dim) for norm_block, dim in sizes]
    assert found == [32, 32, 32, 32, 32, 32, 64, 32, 32, 64, 32, 64, 32, 32, 128]
    assert TurboQuantFormat(norm_block=16).group(128) == 16


def test_q4_takes_the_signed_value_of_largest_magnitude():
    """By hand: -8 is the largest, so the scale is 1. Ties go up, and eight steps on the other side do not fit."""
    x = torch.zeros(1, 32)
    x[0, :6] = torch.tensor([-8.0, 7.9, 0.5, -0.5, 7.4, 3.0])
    code, scale = QuantBlockFormat(bits=4).encode(x)
    assert scale.tolist() == [1.0]
    assert code[0, :7].tolist() == [0, 15, 9, 8, 15, 11, 8]
    code, scale = QuantBlockFormat(bits=4).encode(-x)
    assert scale.tolist() == [-1.0] and code[0, :2].tolist() == [0, 15]
    assert not restored(QuantBlockFormat(bits=4), torch.zeros(1, 32)).any()


def test_q4_beats_one_scale_of_seven_steps():
    """The specification says that `max / 7` has 27 % more MSE; of these 128000 numbers 1 % is chance."""
    x = normal(4000, 32)
    d = x.abs().amax(-1, keepdim=True) / 7
    seven = ((torch.round(x / d) * d - x).square().mean() / x.square().mean()).item()
    assert 1.24 < seven / mse(QuantBlockFormat(bits=4), x) < 1.30


def test_q8_errs_by_half_a_step():
    x = normal(500, 32) * 10
    step = x.abs().amax(-1, keepdim=True) / 127
    # the scale is rounded to 11 bits, by 2^-11 of up to 127 steps
    assert ((restored(QuantBlockFormat(bits=8), x) - x).abs() <= step * (0.5 + 127 * 2**-11)).all()


@pytest.mark.parametrize(
    ("k_format", "v_format"), [("turbo4", "q8"), ("q8", "turbo4"), ("turbo3", "turbo2"), ("model", "q4")]
)
@pytest.mark.parametrize("dim", [48, 80, 128])
def test_a_side_is_rotated_where_its_format_asks_for_it(k_format: str, v_format: str, dim: int):
    """What is stored dequantizes to the keys and values, or to the rotated ones, within what the codes cost."""
    layer = make_layer(("turboquant", {"k_format": k_format, "v_format": v_format}))
    q, k, v = random_qkv(1, 64, dim=dim)
    v[..., 5] += 4
    feed(layer, q, k, v, [64])
    limit = {"turbo4": 0.12, "turbo3": 0.22, "turbo2": 0.4, "q8": 0.01, "q4": 0.15, "model": 0.0}
    for side, x, fmt, name in (("k", k, layer.spec.k, k_format), ("v", v, layer.spec.v, v_format)):
        stored = fmt.read(side_of(layer.state, side), 1).dequantize()[:, :, 0]
        expected = rotate(x) if name.startswith("turbo") else x
        assert (stored - expected).norm() <= limit[name] * expected.norm()


def test_outputs_are_rotated_back_once():
    """Nothing is packed yet, so attention is exact, whatever is rotated."""
    q, k, v = random_qkv(1, 60, dim=80)
    outputs = [
        feed(make_layer(("turboquant", {"k_format": "turbo4", "rotate": way})), q, k, v, [40, 60])
        for way in ("hadamard", "none")
    ]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)
