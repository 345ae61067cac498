"""KIVI's format against its definition."""

from __future__ import annotations

import pytest
import torch
from helpers import feed, make_layer, random_qkv

from qattn_kernels.formats.kivi.reference import asymmetric, encode
from qattn_kernels.formats.packed import pack, unpack
from qattn_kernels.layer.state import side_of


def test_codes_by_hand():
    """From -1 to 2 in 2 bits the scale is 1; a range of nothing has scale 0, and its only value comes back."""
    low, high = torch.tensor([-1.0, 5.0]), torch.tensor([2.0, 5.0])
    scale, zero_point = asymmetric(low, high, 2)
    assert scale.tolist() == [1.0, 0.0] and zero_point.tolist() == [-1.0, 5.0]
    x = torch.tensor([[-1.0, 5.0], [0.4, 5.0], [0.5, 5.0], [2.0, 5.0]])  # 1.5 steps round to even
    code = encode(x, scale, zero_point, 2)
    assert code[:, 0].tolist() == [0, 1, 2, 3] and code[:, 1].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("bits", "clip", "scale", "zero_point"), [(2, 1.0, 2.0, 0.0), (2, 0.0, 8 / 3, -1.0), (3, 1.0, 1.0, -0.5)]
)
def test_a_clipped_range_by_hand(bits: int, clip: float, scale: float, zero_point: float):
    """From -1 to 7: with `clip=1` no value of the range errs by more than half a step, as the ends do then."""
    got = asymmetric(torch.tensor([-1.0]), torch.tensor([7.0]), bits, clip)
    assert got[0].item() == pytest.approx(scale, rel=2**-11) and got[1].item() == zero_point  # half a unit of fp16
    x = torch.linspace(-1, 7, 801)
    error = (encode(x, *got, bits) * got[0].float() + got[1].float() - x).abs()
    assert error.max() <= scale / 2 * 1.001  # of fp16
    assert (error[0] > 0.99 * scale / 2) == (clip == 1) == (error[-1] > 0.99 * scale / 2)


def test_ranges_of_more_bits_are_never_clipped():
    """Ranges of more than 2 bits lose less without clipping, also for 4-bit heads in a mixed layer."""
    q, k, v = random_qkv(1, 64)
    kivi = {"group_size": 64, "residual_length": 0}
    for method, settings in (("kivi", kivi | {"bits": 3}), ("kivi", kivi | {"bits": 4}), ("turbo", {"bits": 4})):
        plain, clipped = (make_layer((method, settings | {"clip": clip})) for clip in (0.0, 1.0))
        outs = [feed(layer, q, k, v, [40, 64]) for layer in (plain, clipped)]
        assert torch.equal(*outs) and all(torch.equal(x, clipped.state[name]) for name, x in plain.state.items())


def test_codes_come_from_the_rounded_scale():
    """1000.25 is 1000 in fp16 and the scale 0.1 is not exact: codes must be the nearest with what is stored."""
    x = 1000.25 + torch.arange(16) * 0.1
    scale, zero_point = asymmetric(x.min(), x.max(), 4)
    code = encode(x, scale, zero_point, 4)
    grid = torch.arange(16) * scale.float() + zero_point.float()
    assert torch.equal(code.long(), (x[:, None] - grid).abs().argmin(1))


def test_values_beyond_fp16_stay_finite():
    scale, zero_point = asymmetric(torch.tensor([-1e30]), torch.tensor([1e30]), 2)
    assert scale.isfinite().all() and zero_point.isfinite().all()
    assert encode(torch.tensor([-1e30, 1e30]), scale, zero_point, 2).tolist() == [0, 3]


def test_three_bits_lie_in_two_planes():
    code = torch.randint(0, 8, (2, 64, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack(code, 3)
    assert packed.shape == (2, 24, 5) and torch.equal(unpack(packed, 3), code)


@pytest.mark.parametrize("dim", [32, 80])
def test_keys_over_their_norms_are_codes_of_keys_of_norm_1(dim: int):
    """Keys are dequantized by hand; norms range from 1 to 1e-3 in one group. The norms add 2 bytes per key."""
    q, k, v = random_qkv(1, 64, dim=dim)
    k = k * torch.logspace(0, -3, 64)[:, None]
    sizes = {}
    for token_norm in (False, True):
        layer = make_layer(("kivi", {"group_size": 64, "residual_length": 0, "token_norm": token_norm}))
        feed(layer, q, k, v, [64])
        state = side_of(layer.state, "k")
        sizes[token_norm] = sum(x[0, 0, 0].nbytes for name, x in state.items() if name not in ("ring", "sink"))
    assert sizes[True] - sizes[False] == 2 * 64
    norm = k.double().square().mean(-1).sqrt().half().float()
    unit = k / norm[..., None]
    low, high = unit.aminmax(dim=-2)
    scale, zero_point = asymmetric(low, high, 2)
    code = encode(unit, scale[:, :, None], zero_point[:, :, None], 2)
    want = (code * scale[:, :, None].float() + zero_point[:, :, None].float()) * norm[..., None]
    held = layer.spec.k.read(state, 1).dequantize()[:, :, 0]
    assert ((held - want).abs() <= 2e-3 * want.abs() + 1e-7).double().mean() > 0.99  # a norm's last bit may move a code
    error = ((held - k).norm(dim=-1) / k.norm(dim=-1)).mean((0, 1))
    assert error[-16:].mean() < 1.2 * error[:16].mean()  # smallest and largest keys, each a mean of 32


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e30])
def test_a_norm_of_any_size_stays_finite(size: float):
    q, k, v = random_qkv(1, 64)
    layer = make_layer(("kivi", {"group_size": 64, "residual_length": 0, "token_norm": True}))
    out = feed(layer, q, k * size, v, [63, 64])
    assert out.isfinite().all() and layer.spec.k.read(side_of(layer.state, "k"), 1).dequantize().isfinite().all()


@pytest.mark.parametrize(("group", "residual"), [(32, 128), (64, 20), (128, 0)])
def test_what_is_packed_follows_from_the_length_alone(group: int, residual: int):
    """`max(0, (S - R) // G * G)` tokens are packed, and open tokens are unchanged."""
    q, k, v = random_qkv(1, 300)
    layer = make_layer(("kivi", {"group_size": group, "residual_length": residual}))
    for start, end in ((0, 33), (33, 150), (150, 151), (151, 300)):
        feed(layer, *(x[:, :, start:end] for x in (q, k, v)), [end - start])
        packed = max(0, (end - residual) // group * group)
        assert int(layer.state["closed"][0]) * group == packed == int(layer.state["open_start"][0])
    ring = layer.state["k.ring"]
    open_now = torch.arange(packed, 300)
    assert torch.equal(ring[:, :, open_now % ring.shape[2]], k[:, :, packed:])


def test_keys_err_by_channel_and_values_by_token():
    """Each value's error is at most half a step of its group, plus the rounding of scale and zero point in fp16.

    An outlier channel does not affect other key channels, and an outlier token does not affect other values.
    """
    g = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 1, 2, 64, 40, generator=g)  # the second group of channels is a short one
    k[..., 3] += 50
    v[:, :, 7] *= 50
    layer = make_layer(("kivi", {"bits": 4, "residual_length": 0}))
    feed(layer, torch.zeros(1, 2, 64, 40), k, v, [64])
    for side, x, fmt in (("k", k, layer.spec.k), ("v", v, layer.spec.v)):
        blocks = x.unflatten(2, (2, 32))
        error = (fmt.read(side_of(layer.state, side), 2).x - blocks).abs()
        if side == "k":
            reach = (blocks.amax(-2) - blocks.amin(-2))[..., None, :]
        else:
            parts = [p.amax(-1, True) - p.amin(-1, True) for p in blocks.split(32, -1)]
            reach = torch.cat([p.expand(*p.shape[:-1], n) for p, n in zip(parts, (32, 8), strict=True)], -1)
        assert (error <= reach / 15 / 2 + 2**-10 * (reach + blocks.abs())).all()


def test_more_bits_are_never_worse():
    _, k, v = random_qkv(2, 128)
    errors = []
    for bits in (2, 3, 4):
        layer = make_layer(("kivi", {"bits": bits, "residual_length": 0}))
        feed(layer, torch.zeros(2, 4, 128, 32), k, v, [128])
        found = [
            (fmt.read(side_of(layer.state, side), 4).x.flatten(2, 3) - x).norm() / x.norm()
            for side, fmt, x in (("k", layer.spec.k, k), ("v", layer.spec.v, v))
        ]
        errors.append(torch.stack(found))
    assert (errors[0] > 1.8 * errors[1]).all() and (errors[1] > 1.8 * errors[2]).all()  # a bit halves a step
