"""NF4's levels and format against the paper; its kernels are in the cases of `test_fused_kernels.py`."""

from __future__ import annotations

import pytest
import torch
from helpers import feed, make_layer, normal, random_qkv
from test_turboquant import restored

from qattn_kernels.formats.nf4.reference import Nf4Format, integers, quantiles
from qattn_kernels.formats.quant_block.reference import QuantBlockFormat
from qattn_kernels.layer.state import side_of
from qattn_kernels.ops.rotate.reference import rotate

PRINTED = (  # QLoRA, appendix E
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def test_levels_are_the_papers():
    assert quantiles() == pytest.approx(PRINTED, abs=1e-6)  # theirs are of fp32
    assert max(abs(a / 127 - b) for a, b in zip(integers(), PRINTED, strict=True)) <= 0.5 / 127 + 1e-6


def test_levels_as_int8_cost_less_than_a_hundredth_of_the_error():
    x = normal(4000, 64)
    top = x.abs().amax(-1, keepdim=True)
    grid = torch.tensor(PRINTED)
    paper = grid[((x / top)[..., None] - grid).abs().argmin(-1)] * top
    assert (restored(Nf4Format(), x) - x).square().mean() < 1.01 * (paper - x).square().mean()


@pytest.mark.parametrize("size", [32, 64, 128])
def test_codes_are_the_nearest_of_all_levels(size: int):
    fmt, x = Nf4Format(group_size=size), 7 * normal(500, size)
    code, stored = fmt.encode(x)
    scale = fmt.scales(stored)
    torch.testing.assert_close(scale, x.abs().amax(-1), rtol=2**-11, atol=0)  # rounded to 11 bits
    distance = ((x / scale[:, None])[..., None] - torch.tensor(integers()) / 127).abs()
    chosen = distance.gather(-1, code.long()[..., None])[..., 0]
    assert (chosen <= distance.amin(-1) + 1e-6).all(), "another level is nearer"
    assert code.min() == 0 and code.max() == 15


def test_what_is_nothing_stays_nothing_and_what_is_huge_finite():
    x = torch.zeros(2, 64)
    x[1, 5] = -3.0
    assert torch.equal(restored(Nf4Format(), x), x), "zero and the largest are levels"
    assert restored(Nf4Format(), torch.full((1, 64), -1e30)).isfinite().all()


@pytest.mark.parametrize("size", [32, 64, 128])
def test_normal_numbers_err_less_than_with_even_steps(size: int):
    """At the same bits than with INT4 of 15 even steps; of llama.cpp's 16 steps that holds from 64 channels on."""
    x = normal(4000, size)
    step = x.abs().amax(-1, keepdim=True) / 7
    even = (torch.round(x / step) * step - x).square().mean()
    found = (restored(Nf4Format(group_size=size), x) - x).square().mean()
    assert found < 0.85 * even
    assert bool(found < (restored(QuantBlockFormat(bits=4), x) - x).square().mean()) is (size > 32)


@pytest.mark.parametrize("rotation", ["none", "hadamard"])
@pytest.mark.parametrize("dim", [48, 80, 128])
def test_what_is_held_is_the_keys_and_values(dim: int, rotation: str):
    """Stored keys and values differ from the inputs only by the codes' error, rotated if the setting asks for it, for
    head dims that no group divides as well."""
    layer = make_layer(("nf4", {"rotate": rotation}))
    q, k, v = random_qkv(1, 64, dim=dim)
    feed(layer, q, k, v, [64])
    for side, x, fmt in (("k", k, layer.spec.k), ("v", v, layer.spec.v)):
        held = fmt.read(side_of(layer.state, side), 1).dequantize()[:, :, 0]
        wanted = rotate(x) if rotation == "hadamard" else x
        assert (held - wanted).norm() <= 0.12 * wanted.norm()
