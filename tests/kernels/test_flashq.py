"""FlashQ's two stages against their definition, and its head-wise bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import feed, make_layer, random_qkv
from hypothesis import given, settings
from hypothesis import strategies as st

from qattn_hf.methods import get_method
from qattn_kernels.formats.base import Operand, int8_tokens
from qattn_kernels.formats.flashq.reference import head_priority, stage_one, stage_two
from qattn_kernels.formats.packed import pack, unpack
from qattn_kernels.formats.scales import from_bits, to_bits
from qattn_kernels.layer.state import side_of


@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 2]), st.sampled_from([0.0, 0.75, 1.0]), st.floats(1e-20, 1e20))
@settings(max_examples=60, deadline=None)
def test_undone_codes_fit_int8_and_are_near(seed: int, bits: int, clip: float, size: float):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 2, 64, 8, generator=g) * size * torch.rand(1, 2, 1, 8, generator=g)
    x1, scale = stage_one(int8_tokens(x))
    keep = torch.ones(1, 2, 64, dtype=torch.bool)
    code, channel_scale, zero_point = (t.int() for t in stage_two(x1, keep, bits, clip))
    dequantize = code * channel_scale[:, :, None] + zero_point[:, :, None]
    assert zero_point.min() >= -127 and zero_point.max() <= 117
    assert dequantize.min() >= -123 and dequantize.max() <= 122
    reach = (
        channel_scale[:, :, None] / 2 + (2**bits - 1) / 2
    )  # half a step, and what rounding the step itself can lose at the ends
    assert ((dequantize - x1.int()).abs() <= reach).all()
    assert ((x1 * scale[..., None, None] - x).abs() <= scale[..., None, None] * 1.001).all()


def test_stage_two_by_hand():
    """A channel from -100 to 20: 4 bits scale (240 + 15) // 30 = 8, zero point -100 + ((120 - 120) >> 1) = -100."""
    x1 = torch.tensor([-100, 20, -60, 0]).view(1, 1, 4, 1).to(torch.int8)
    code, channel_scale, zero_point = stage_two(x1, torch.ones(1, 1, 4, dtype=torch.bool), 4)
    codes = [0, 15, 5, 12]  # 12.5 rounds to even
    assert (channel_scale.item(), zero_point.item(), code.flatten().tolist()) == (8, -100, codes)
    code, channel_scale, zero_point = stage_two(x1, torch.ones(1, 1, 4, dtype=torch.bool), 2, clip=1.0)
    assert (channel_scale.item(), zero_point.item(), code.flatten().tolist()) == (30, -85, [0, 3, 1, 3])
    code, channel_scale, zero_point = stage_two(x1, torch.tensor([[[False, True, True, True]]]), 2)
    assert (channel_scale.item(), zero_point.item(), code.flatten().tolist()) == (27, -61, [0, 3, 0, 2])


def test_stage_one_shares_the_largest_token_scale():
    x = torch.tensor([[119.0, 0.0], [0.25, -1.0], [0.0, 0.0]])
    tokens = int8_tokens(x)
    assert tokens.x.tolist() == [[119, 0], [30, -119], [0, 0]] and tokens.scales[2] == 0
    x1, scale = stage_one(tokens)
    assert scale == 1.0 and x1.tolist() == [[119, 0], [0, -1], [0, 0]]


@pytest.mark.parametrize("bits", [4, 2])
def test_values_with_a_scale_a_token_are_codes_of_their_int8_numbers(bits: int):
    """Dequantized by hand from the state; sizes from 1 to 1e-4 in one block. 2 bytes a token, no scale a block."""
    q, k, v = random_qkv(1, 64)
    v = v * torch.logspace(0, -4, 64)[:, None]
    layer = make_layer(("turbo", {"v_scale": "token", "bits": bits}))
    feed(layer, q, k, v, [64])
    state, tokens = side_of(layer.state, "v"), int8_tokens(v)
    code, channel_scale, zero_point = stage_two(tokens.x, torch.ones(1, 2, 64, dtype=torch.bool), bits)
    numbers = code.int() * channel_scale[:, :, None].int() + zero_point[:, :, None]
    want = numbers.double() * from_bits(to_bits(tokens.scales)).double()[..., None]
    held = layer.spec.v.read(state, 1).dequantize()[:, :, 0]
    torch.testing.assert_close(held.double(), want, rtol=1e-6, atol=0)  # one product in fp32
    assert state["scale"].shape == (1, 2, 8, 64) and state["scale"].dtype == torch.int16
    error = ((held - v).norm(dim=-1) / v.norm(dim=-1)).mean((0, 1))
    assert error[-16:].mean() < 1.2 * error[:16].mean()  # smallest and largest tokens, each a mean of 32


def test_a_token_of_zeros_does_not_bend_its_block():
    x = torch.randn(1, 1, 64, 32, generator=torch.Generator().manual_seed(0)) * 0.01
    x[:, :, 5] = 0
    x1, scale = stage_one(int8_tokens(x))
    assert scale.item() < 1e-3 and x1.abs().max() == 119


@pytest.mark.parametrize("bits", [4, 2])
def test_pack_puts_far_tokens_in_a_byte(bits: int):
    code = torch.randint(0, 2**bits, (2, 3, 64, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack(code, bits)
    assert packed.shape == (2, 3, 64 * bits // 8, 5)
    assert torch.equal(unpack(packed, bits), code)
    assert torch.equal(packed[..., 0, :] >> bits & (2**bits - 1), code[..., 64 * bits // 8, :])


def test_more_bits_are_never_worse():
    x1, _ = stage_one(int8_tokens(random_qkv(2, 64)[1]))
    keep = torch.ones(2, 2, 64, dtype=torch.bool)
    errors = []
    for bits in (2, 4):
        code, channel_scale, zero_point = (t.int() for t in stage_two(x1, keep, bits))
        errors.append((code * channel_scale[:, :, None] + zero_point[:, :, None] - x1).square().float().mean((-1, -2)))
    assert (errors[1] < errors[0] / 4).all()  # the step is five times smaller


@pytest.mark.parametrize("kind", ["priority", "min_max", "variation", "entropy", "random"])
def test_priority_is_of_the_numbers_and_ties_go_to_the_lower_head(kind: str):
    x = random_qkv(2, 64, dim=16)[1]
    x = torch.cat([x, x[:, :1] * 8], 1)  # heads 0, 1, and 0 eight times as large
    tokens = int8_tokens(x)
    keep = torch.ones(2, 3, 64, dtype=torch.bool)
    found = head_priority(*stage_one(tokens), keep, kind)
    if kind in ("min_max", "variation", "priority"):
        dequantize = tokens.dequantize().double()
        gap = dequantize.amax(2) - dequantize.amin(2)
        whole = dequantize.amax((2, 3)) - dequantize.amin((2, 3))
        want = {"min_max": whole, "variation": gap.std(-1), "priority": whole * gap.std(-1)}[kind]
        assert (found - want).abs().max() < 0.05 * want.max()  # X1 is rounded to 1 / 119 of the largest
        assert (found[:, 2] > found[:, 0]).all()
    if kind == "entropy":
        torch.testing.assert_close(found[:, 2], found[:, 0])  # the shape of the histogram, not its width
        share = torch.histc(stage_one(tokens)[0][0, 0].double(), 256) / (64 * 16)
        torch.testing.assert_close(found[0, 0], torch.special.entr(share).sum(), rtol=1e-6, atol=0)
    assert found.shape == (2, 3) and found.dtype == torch.float64


def test_mixed_bits_are_decided_row_by_row():
    q, k, v = random_qkv(2, 130)
    k, v = k.clone(), v.clone()
    k[0, 0] *= 9
    k[1, 1] *= 9
    v[:, 1] *= 9
    layer = make_layer(("turbo", {"bits": "mixed"}))
    feed(layer, q, k, v, [130])
    bits = {s: fmt.bits_per_head(side_of(layer.state, s), 2) for s, fmt in (("k", layer.spec.k), ("v", layer.spec.v))}
    assert bits == {"k": [[4, 2], [2, 4]], "v": [[2, 4], [2, 4]]}


def test_a_recipe_list_wins_for_all_rows():
    settings = {"bits": "mixed", "k_low_heads": [[]], "v_low_heads": [[0, 1]]}
    layer = make_layer(("turbo", settings))
    feed(layer, *random_qkv(2, 70), [70])
    assert layer.spec.k.bits_per_head(side_of(layer.state, "k"), 2) == [[4, 4]] * 2
    assert layer.spec.v.bits_per_head(side_of(layer.state, "v"), 2) == [[2, 2]] * 2
    one = make_layer(("turbo", {"bits": "mixed", "k_low_heads": [[1]], "v_low_heads": [[0]]}))
    feed(one, *random_qkv(2, 70), [70])
    assert one.spec.k.bits_per_head(side_of(one.state, "k"), 2) == [[4, 2]] * 2


UNIVERSAL = ("paper_turbo", {"buffer_scale": "universal"})


@pytest.mark.parametrize("side", ["k", "v"])
def test_universal_scale_comes_from_the_first_call(side: str):
    q, k, v = random_qkv(2, 200)
    x = {"k": k, "v": v}[side]
    x[:, :, 100] *= 3  # after the first block
    layer = make_layer(UNIVERSAL)
    feed(layer, q, k, v, [150])
    scale = x[:, :, :150].abs().amax((2, 3)) / 119
    torch.testing.assert_close(layer.state[f"{side}.universal"], scale)
    assert torch.equal(layer.state[f"{side}.scale"][:, :, 0], layer.state[f"{side}.universal"]), (
        "of all tokens of that call"
    )
    assert layer.state[f"{side}.clamped"].sum() == 0
    x[0, 1, 160, 4:7] = 10 * x.abs().max()
    feed(layer, *(x[:, :, 150:] for x in (q, k, v)), [50])
    assert layer.state[f"{side}.clamped"][0, 1] >= 3, "each of the three values"
    fmt = getattr(layer.spec, side)
    held = fmt.read(side_of(layer.state, side), 8).dequantize()[0, 1, 160 // 64, 160 % 64, 4]
    assert held < 1.1 * scale[0, 1] * 119  # clamped to the scale of the first call


def test_what_is_beyond_the_universal_scale_is_clamped_in_the_ring():
    """Open tokens of single steps use the universal scale as well.

    A number beyond it is read as the largest code, 119, and counted once.
    """
    q, k, v = random_qkv(2, 72)
    for x in (k, v):
        x[0, 1, 71, :3] = torch.tensor([500.0, -500.0, 500.0])
    layer = make_layer(UNIVERSAL)
    feed(layer, q, k, v, [64, *range(65, 73)])
    for side, x, fmt in (("k", k, layer.spec.k), ("v", v, layer.spec.v)):
        top = x[:, :, :64].abs().amax((2, 3))
        ring = fmt.ring(side_of(layer.state, side)).dequantize()
        torch.testing.assert_close(ring[0, 1, 71, :3], top[0, 1] * torch.tensor([1.0, -1.0, 1.0]))
        scale = fmt.ring(side_of(layer.state, side)).scales
        torch.testing.assert_close(scale[:, :, 64:72], (top / 119)[..., None].expand(-1, -1, 8))
        beyond = (torch.round(x[:, :, 64:] / (top / 119)[..., None, None]).abs() > 119).sum((2, 3))
        assert torch.equal(layer.state[f"{side}.clamped"], beyond) and beyond[0, 1] >= 3


def test_tokens_before_the_universal_scale_are_never_clamped():
    q, k, v = (1000 * x for x in random_qkv(1, 60))
    layer = make_layer(UNIVERSAL)
    feed(layer, q, k, v, [40, 60])
    assert not layer.state["k.universal"].any() and not layer.state["k.clamped"].any()
    ring = layer.spec.k.ring(side_of(layer.state, "k")).dequantize()[:, :, :60]
    assert (
        (ring - k).abs() <= k.abs().amax(-1, keepdim=True) / 119 / 2 * 1.001
    ).all()  # half a step of the token's own


def test_universal_scale_of_a_short_first_call_waits_for_a_block():
    q, k, v = random_qkv(1, 140)
    layers = [make_layer(UNIVERSAL) for _ in range(2)]
    feed(layers[0], q, k, v, [40, 100, 140])
    feed(layers[1], q, k, v, list(range(1, 141)))
    for layer in layers:
        torch.testing.assert_close(layer.state["k.universal"], k[:, :, :64].abs().amax((2, 3)) / 119)
    assert all(torch.equal(layers[0].state[n], layers[1].state[n]) for n in layers[0].state)
    layers[0].crop(-90)
    assert (layers[0].state["k.universal"] == 0).all()


def test_operand_undoes():
    assert Operand(torch.tensor([[2, -3]], dtype=torch.int8), torch.tensor([0.5])).dequantize().tolist() == [
        [1.0, -1.5]
    ]


def test_other_lists_of_heads_need_no_other_kernels():
    """A tuned recipe lists other heads in each layer; which and how many they are is no constant of a kernel."""
    pytest.importorskip("triton")
    from qattn_kernels.launch.constants import sizes_of

    def sizes(low: list[int]) -> Any:
        settings = {"bits": "mixed", "k_low_heads": [low], "v_low_heads": [[0]]}
        return sizes_of(get_method("turbo")(**settings).layer_spec(0, 1, 4), 4, 2, 64, 1, True, False, False)

    assert sizes([0]) == sizes([1, 3]) == sizes([0, 1, 3]) != sizes([])
    assert sizes([0, 1, 2, 3]) not in (sizes([0]), sizes([]))
